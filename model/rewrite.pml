/* `rewrite_all`: many sessions restored in batches, by a thread beside the event loop, cancelled at any time.
 *
 * Two sessions, a batch for each; workers 0 and 1 live, worker 2 is dead. Who has each session at first is any of nobody, one
 * of the three. Worker 1 rewrites both; requests, single restores, sweeps and worker 0's own rewrite go on meanwhile.
 * [directory/restores.py rewrite_all, _rewritten, _take_in_thread]
 *
 * Run by `python model/check.py`; see README.md. The words and steps are those of ownership.pml, and what is checked there
 * in more detail (acquire, forwarding, death) is only as detailed here as the batches need.
 */
#define NONE 9
#define DEAD 2
#define MOVING 99
#define TURNS 4
#define I(w,s) ((w)*2+(s))

hidden byte without, only, sessions, requests, sweeps, restores, rewrites, crashes, cancels;

#define OPENED_THOUGH_OPEN_ALREADY    (without==1)   /* what the thread took is opened without asking whether it is open by now */
#define MEMORY_CHANGED_IN_THE_THREAD  (without==2)
#define CANCELLED_LEAVES_ITS_BATCH    (without==3)
#define FORGETS_WHAT_IT_TOOK_ON_ERROR (without==4)
#define TAKEN_WITHOUT_THE_LOCK        (without==5)
#define SETTLED_BY_THE_FIRST_TO_END   (without==6)   /* not by the last of the restores and rewrites of one session */
#define BUSY_AFTER_A_CHANGE           (without==7)   /* the owner drops the state, and then says busy */
#define BATCH_AFTER_A_CANCELLATION    (without==8)
#define GIVEN_BEFORE_IT_IS_OPEN       (without==9)   /* a give does not wait for the restores and rewrites here */
/* a second line: nothing fails without it, since the rewrite's caller holds the sessions */
#define RELEASED_WHILE_TAKEN          (without==40)  /* a release does not leave alone what is being taken */

byte rec[2];
byte lock = NONE;
bool alive[3];
bool loop[3];
bool mine[6];
byte srv[6];
byte fence[6];
byte taking[6];
byte st[6];
bool held[2];                   /* the rewrite's caller holds its sessions, from before the call until it ends */
bool cancelled[2];              /* and a cancelled rewrite's asks and waits are abandoned */
byte inner[2];                  /* sessions of its batch that a rewrite asks for one by one */

byte handlers[6];
byte truth[2];
byte inc = 1;
byte live_work;
bool v_split, v_hollow, v_two, v_bare, v_stuck, v_replaced, v_after;

#define CHECK(n,v)  assert(!(v) || (only!=0 && only!=n))
#define BEL(w,s)    (alive[w] && mine[I(w,s)] && !loop[w])
#define STUCK(w,s)  (alive[w] && ((rec[s]==w)!=mine[I(w,s)] || (st[I(w,s)]!=0 && (!mine[I(w,s)] || st[I(w,s)]!=truth[s])) || srv[I(w,s)]>0 || fence[I(w,s)]>0 || taking[I(w,s)]>0 || (rec[s]==w && st[I(w,s)]==0)))

inline invariants() {
  v_two = (BEL(0,0) && BEL(1,0)) || (BEL(0,1) && BEL(1,1)); CHECK(3,v_two);
  v_bare = (BEL(0,0) && rec[0]!=0) || (BEL(0,1) && rec[1]!=0) || (BEL(1,0) && rec[0]!=1) || (BEL(1,1) && rec[1]!=1); CHECK(4,v_bare)
}
inline await_(w) { loop[w]=false; invariants() }
inline open_here(w,s) {
  v_replaced = (handlers[I(w,s)]>0); CHECK(8,v_replaced);
  mine[I(w,s)]=true; inc++; st[I(w,s)]=inc; truth[s]=inc
}
inline remove(w,s) {
  x = rec[s];
  if :: x==w -> rec[s]=NONE :: else fi;
  atomic { mine[I(w,s)]=false; await_(w) }
}

proctype Req(byte s) {
  byte at, cur, o, x, looks=0; bool ok, peer=false;
  atomic { if :: at=0 :: at=1 fi; cur=at };
  { cur=at;
look:
    atomic { !loop[cur] ->
      loop[cur]=true;
      if
      :: mine[I(cur,s)] && rec[s]==cur && fence[I(cur,s)]==0 -> srv[I(cur,s)]++; goto handle
      :: mine[I(cur,s)] && rec[s]==cur && fence[I(cur,s)]>0 -> loop[cur]=false; goto fin
      :: else
      fi };
    atomic {
      o=rec[s];
      if
      :: o==cur || o==DEAD -> loop[cur]=false; goto fin           /* moving: 503; a dead worker's: gone */
      :: o!=cur && o!=DEAD && peer -> loop[cur]=false; cur=at; peer=false; looks++; if :: looks<2 -> goto look :: else -> goto fin fi
      :: o==NONE && !peer -> skip
      :: o!=cur && o!=DEAD && o!=NONE && !peer -> loop[cur]=false; if :: alive[o] -> cur=o; peer=true; goto look :: else -> goto fin fi
      fi };
    atomic { if :: rec[s]==NONE -> rec[s]=cur; ok=true :: else -> ok=false fi };
    atomic {
      if
      :: ok && fence[I(cur,s)]==0 -> mine[I(cur,s)]=true; srv[I(cur,s)]++; goto handle
      :: ok && fence[I(cur,s)]>0 -> mine[I(cur,s)]=true; if :: taking[I(cur,s)]==0 || RELEASED_WHILE_TAKEN -> goto rel :: else -> await_(cur); goto fin fi
      :: else -> await_(cur); looks++; if :: looks<2 -> goto look :: else -> goto fin fi
      fi };
handle:
    atomic {
      v_split = (handlers[I(1-cur,s)]>0); CHECK(1,v_split);
      v_hollow = (st[I(cur,s)]!=truth[s]); CHECK(2,v_hollow);
      if :: st[I(cur,s)]==0 -> inc++; st[I(cur,s)]=inc; truth[s]=inc :: else fi;
      handlers[I(cur,s)]++; await_(cur) };
    atomic { !loop[cur] ->
      loop[cur]=true;
      if :: skip :: if :: st[I(cur,s)]==truth[s] -> truth[s]=0 :: else fi; st[I(cur,s)]=0 fi;
      handlers[I(cur,s)]--; srv[I(cur,s)]--;
      if
      :: mine[I(cur,s)] && srv[I(cur,s)]==0 && st[I(cur,s)]==0 && (taking[I(cur,s)]==0 || RELEASED_WHILE_TAKEN) && !held[cur] -> goto rel
      :: await_(cur); goto fin
      fi };
rel:
    remove(cur,s)
  } unless { !alive[cur] };
fin: live_work--
}

proctype Sweep(byte w; byte s) {
  byte x;
  {
    atomic { !loop[w] -> if :: mine[I(w,s)] && srv[I(w,s)]==0 && st[I(w,s)]==0 && (taking[I(w,s)]==0 || RELEASED_WHILE_TAKEN) && !held[w] -> loop[w]=true :: else -> goto fin fi };
    remove(w,s)
  } unless { !alive[w] };
fin: live_work--
}

/* One session: a restore of its own, or (within) one of a rewrite's batch, which counts and settles it. */
proctype Restore(byte to; byte s; bool within) {
  byte cur, o, x, turns=0, asked=0; bool ok, gone=false, opened=false;
  cur=to;
again:
  {
    if
    :: cur!=to -> atomic { cur=to; goto turn }
    :: cur==to && !within -> atomic { !loop[to] -> taking[I(to,s)]++ }
    :: cur==to && within -> skip
    fi;
turn:
    atomic { !loop[to] -> loop[to]=true; o=rec[s]; turns++; if :: skip :: !within -> gone=true :: within && cancelled[to] -> gone=true fi };
    if
    :: o==to && !mine[I(to,s)] -> if :: gone -> goto settle :: else -> goto opens fi
    :: (o!=to || mine[I(to,s)]) && (gone || turns>TURNS) -> goto settle
    :: o==NONE && !gone && turns<=TURNS ->
         atomic { if :: rec[s]==NONE -> rec[s]=to; ok=true :: else -> ok=false fi };
         if :: ok -> goto opens :: else -> atomic { await_(to) }; goto turn fi
    :: o==to && mine[I(to,s)] && !gone && turns<=TURNS ->
         atomic { fence[I(to,s)]++; await_(to) };
         atomic {
           if
           :: (!loop[to] && srv[I(to,s)]==0) -> fence[I(to,s)]--; loop[to]=true
           :: !loop[to] && (!within || cancelled[to]) -> fence[I(to,s)]--; gone=true; loop[to]=true; goto settle
           fi };
         atomic { x=rec[s]; if :: mine[I(to,s)] && x==to -> goto opens :: else -> await_(to); goto turn fi }
    :: o!=NONE && o!=to && !gone && turns<=TURNS && !alive[o] ->
         atomic { await_(to) };
         atomic {
           if
           :: (!loop[to] && lock==NONE) -> lock=to; loop[to]=true
           :: !loop[to] -> loop[to]=true; goto settle
           fi };
         x=rec[s];
         atomic { if :: x==o -> rec[s]=to :: else fi };
         lock=NONE;
         if :: x==o -> goto opens :: else -> atomic { await_(to) }; goto turn fi
    :: o!=NONE && o!=to && !gone && turns<=TURNS && alive[o] -> skip
    fi;
    atomic { if :: asked>=1 -> goto settle :: else -> asked++ fi; await_(to); cur=o };
    atomic { !loop[cur] -> if :: !mine[I(cur,s)] && taking[I(cur,s)]==0 -> goto answered :: else -> fence[I(cur,s)]++ fi };
    atomic {
      if
      :: (!loop[cur] && srv[I(cur,s)]==0 && (taking[I(cur,s)]==0 || GIVEN_BEFORE_IT_IS_OPEN)) -> loop[cur]=true
      :: !loop[cur] -> fence[I(cur,s)]--; if :: BUSY_AFTER_A_CHANGE && mine[I(cur,s)] -> mine[I(cur,s)]=false; st[I(cur,s)]=0 :: else fi; goto answered
      fi };
    x=rec[s];
    if :: x==cur && mine[I(cur,s)] -> atomic { mine[I(cur,s)]=false; st[I(cur,s)]=0; truth[s]=MOVING }; rec[s]=to :: else fi;
    atomic { fence[I(cur,s)]--; await_(cur) };
answered:
    cur=to;
    goto turn;
opens:
    atomic { if :: !gone -> open_here(to,s); opened=true :: else fi };
settle:
    atomic {
      if :: within -> await_(to); goto fin :: else fi;
      taking[I(to,s)]--;
      if
      :: (taking[I(to,s)]==0 || SETTLED_BY_THE_FIRST_TO_END) && !mine[I(to,s)] -> skip
      :: taking[I(to,s)]==0 && mine[I(to,s)] && !opened && srv[I(to,s)]==0 && st[I(to,s)]==0 && !held[to] -> skip
      :: else -> await_(to); goto fin
      fi };
    atomic { if :: rec[s]==to && truth[s]==MOVING -> truth[s]=0 :: else fi };
    remove(to,s)
  } unless { !alive[cur] };
  if :: cur!=to -> goto again :: else fi;
fin:
  atomic { if :: within -> if :: alive[to] -> inner[to]-- :: else fi :: else -> live_work-- fi }
}

proctype Rewrite(byte me) {
  byte s=0, x, y; bool taken, failed=false;
  {
    do
    :: atomic { s<sessions && !failed && (!cancelled[me] || BATCH_AFTER_A_CANCELLATION) -> v_after=cancelled[me]; CHECK(7,v_after) };
       atomic { !loop[me] -> taking[I(me,s)]++; taken=false };
       x=rec[s];                                                  /* from here, in a thread */
       if
       :: x==NONE && !mine[I(me,s)] -> atomic { if :: rec[s]==NONE -> rec[s]=me; taken=true :: else fi }
       :: x!=NONE && x!=me && !alive[x] ->
            if
            :: TAKEN_WITHOUT_THE_LOCK -> y=x; rec[s]=me; taken=true
            :: !TAKEN_WITHOUT_THE_LOCK ->
                 atomic { if :: lock==NONE -> lock=me; y=NONE :: failed=true fi };
                 if
                 :: failed -> skip                               /* not free in time: 503 */
                 :: else -> y=rec[s]; if :: y==x -> atomic { rec[s]=me; taken=true } :: else fi; lock=NONE
                 fi
            fi
       :: else
       fi;
       if :: taken -> if :: failed=true :: skip fi :: else fi;    /* a later one of the batch fails */
       if :: MEMORY_CHANGED_IN_THE_THREAD && taken -> atomic { mine[I(me,s)]=true } :: else fi;
       if :: CANCELLED_LEAVES_ITS_BATCH && cancelled[me] -> atomic { !loop[me] -> taking[I(me,s)]--; goto over } :: else fi;
       if :: FORGETS_WHAT_IT_TOOK_ON_ERROR && failed -> atomic { !loop[me] -> taking[I(me,s)]--; goto over } :: else fi;
       atomic { !loop[me] ->                                      /* the batch has ended: on the loop again */
         if
         :: taken && (!mine[I(me,s)] || OPENED_THOUGH_OPEN_ALREADY || MEMORY_CHANGED_IN_THE_THREAD) -> open_here(me,s)
         :: else -> if :: !failed && !cancelled[me] -> inner[me]++; run Restore(me,s,true) :: else fi
         fi };
       inner[me]==0;
       atomic { !loop[me] ->
         taking[I(me,s)]--;
         if
         :: (taking[I(me,s)]==0 || SETTLED_BY_THE_FIRST_TO_END) && !mine[I(me,s)] -> loop[me]=true
         :: else -> goto next
         fi };
       atomic { if :: rec[s]==me && truth[s]==MOVING -> truth[s]=0 :: else fi };
       remove(me,s);
next:  s++
    :: else -> break
    od;
over:
    atomic { held[me]=false }
  } unless { !alive[me] };
  live_work--
}
proctype Cancel(byte w) { cancelled[w]=true; live_work-- }
proctype Crash() {
  byte w;
  if :: w=0 :: w=1 fi;
  if
  :: atomic { alive[w]=false; loop[w]=false; mine[I(w,0)]=false; mine[I(w,1)]=false; srv[I(w,0)]=0; srv[I(w,1)]=0; fence[I(w,0)]=0; fence[I(w,1)]=0;
       taking[I(w,0)]=0; taking[I(w,1)]=0; st[I(w,0)]=0; st[I(w,1)]=0; handlers[I(w,0)]=0; handlers[I(w,1)]=0; if :: lock==w -> lock=NONE :: else fi }
  :: skip
  fi;
  live_work--
}

c_decl { \#include <stdlib.h>
  static int given(const char *name, int standard) { const char *text = getenv(name); return text ? atoi(text) : standard; } }

inline begins_at(s) {
  if
  :: rec[s]=NONE
  :: rec[s]=0; mine[I(0,s)]=true; st[I(0,s)]=1; truth[s]=1
  :: rec[s]=1; mine[I(1,s)]=true; st[I(1,s)]=1; truth[s]=1
  :: rec[s]=DEAD; truth[s]=1
  fi
}

init {
  byte i=0, s;
  atomic {
    c_code {
      without = given("WITHOUT", 0); only = given("ONLY", 0); sessions = given("SESSIONS", 2); requests = given("REQUESTS", 1); sweeps = given("SWEEPS", 0);
      restores = given("RESTORES", 0); rewrites = given("REWRITES", 1); crashes = given("CRASHES", 0); cancels = given("CANCELS", 1);
    };
    alive[0]=true; alive[1]=true;
    rec[1]=NONE; begins_at(0); if :: sessions==2 -> begins_at(1) :: else fi;
    live_work = requests + sweeps + restores + rewrites + crashes + cancels;
    i=0; do :: i<rewrites -> held[1-i]=true; run Rewrite(1-i); i++ :: else -> break od;
    i=0; do :: i<requests -> run Req(0); i++ :: else -> break od;
    i=0; do :: i<restores -> run Restore(1-i,0,false); i++ :: else -> break od;
    i=0; do :: i<sweeps -> run Sweep(1,0); i++ :: else -> break od;
    i=0; do :: i<crashes -> run Crash(); i++ :: else -> break od;
    i=0; do :: i<cancels -> run Cancel(1); i++ :: else -> break od;
    i=0
  };
  atomic { (live_work==0 && _nr_pr==1) ->
    do
    :: i<2 ->
       s=0;
       do
       :: s<2 -> if :: alive[i] && mine[I(i,s)] && st[I(i,s)]==0 && srv[I(i,s)]==0 -> if :: rec[s]==i -> rec[s]=NONE :: else fi; mine[I(i,s)]=false :: else fi; s++
       :: else -> break
       od;
       i++
    :: else -> break
    od;
    v_stuck = STUCK(0,0) || STUCK(0,1) || STUCK(1,0) || STUCK(1,1); CHECK(6,v_stuck)
  }
}
