/* The ownership protocol: one session, three workers, steps as fine as system calls and messages.
 *
 * Run by `python model/check.py`, which says what each run leaves out and what is then expected to fail; README.md says what
 * is modelled, what is not, and how to read a failure.
 *
 * A step is one system call, or changes of one worker's memory; other workers run between any two steps, another task of
 * the same worker only at an await: loop[w] is held over a block that has none. A worker dies in any step: it runs no more
 * and its socket refuses, then its life lock and its other locks go; its ID never comes back (a restarted worker is one that
 * has done nothing yet). A pause is a process that is not scheduled, for any time.
 *
 * Names in brackets are the code's: [directory/gives.py Gives.give].
 */
#define N 3
#define NONE 9
#define MOVING 99               /* truth: given away, not open yet: no state is the session's */
#define TURNS 5                 /* of a restore; the code's bound is 16 [directory/restores.py MAX_TURNS] */
#define LOOKS 3                 /* of a request [routing/route.py LOOKS] */

/* ---- the run: numbers from the environment, outside the state ---- */
hidden byte without;            /* the rule that is left out; 0: none */
hidden byte only;               /* 0: all checks; else the one: split hollow two bare gone stuck lock replaced = 1..8 */
hidden byte requests, sweeps, restores, crashes, compactions;
hidden byte asks;               /* that a restore makes at most */
hidden byte first;              /* the worker that has the session at first; NONE: nobody, and it never began */
hidden byte refuse;             /* unowned="refuse": only a start acquires */
hidden byte stop;               /* worker 0 is told to stop */
hidden byte start;              /* worker 2 is not there at first, and starts */
hidden byte place;              /* a start that nobody owns may be sent to any worker [routing/starts.py] */
hidden byte mint;               /* a request that names worker 0 and no session makes the session there, at its reply */

/* ---- the rules that a run can leave out ---- */
#define ACQUIRED_AFTER_THE_HANDLER    (without==1)
#define HANDLED_WHERE_IT_ARRIVES      (without==2)
#define AWAIT_BETWEEN_LOOK_AND_COUNT  (without==3)
#define AWAIT_INSIDE_RELEASE          (without==4)
#define GIVEN_WHILE_SERVED            (without==5)
#define OPENED_AT_THE_DEADLINE        (without==6)
#define NO_LAST_LOOK                  (without==7)
#define STATE_KEPT_BY_THE_GIVER       (without==8)
#define TAKEN_WITHOUT_THE_LOCK        (without==9)
#define LOCK_SURVIVES_ITS_HOLDER      (without==10)
#define REFUSED_IS_GONE               (without==11)
#define ID_LEAVES_BEFORE_ITS_RECORD   (without==12)
#define TAKEN_WITHOUT_A_SECOND_LOOK   (without==13)
#define COMPACTED_WITHOUT_THE_LOCK    (without==14)
#define FOUND_DEAD_AFTER_THE_LOOK     (without==15)
#define DEAD_IS_GUESSED               (without==16)
#define LIFE_LOCKED_AFTER_START       (without==17)
#define LIFE_LET_GO_BEFORE_THE_LAST   (without==18)
#define SOCKET_CLOSED_BEFORE_THE_LAST (without==19)
#define LIFE_KEPT_BY_A_CHILD          (without==20)
#define RELEASED_WHILE_SERVED         (without==21)
#define ABANDONED_KEEPS_THE_RECORD    (without==22)
#define ASK_CUT_BEFORE_ITS_ANSWER     (without==23)
#define SERVED_BEFORE_IT_IS_OPEN      (without==24)
#define GIVEN_WITHOUT_A_LOOK          (without==25)
#define FORGOTTEN_AFTER_THE_GIVE      (without==26)
#define NOT_COUNTED                   (without==27)
#define FENCE_STAYS_AFTER_BUSY        (without==28)
#define FAILED_UNLINK_IS_FORGOTTEN    (without==29)
#define FAILED_GIVE_KEEPS_THE_RECORD  (without==30)
#define RESTORED_WITHOUT_DRAINING     (without==31)
/* second lines: nothing fails without them, and they are kept for what the model does not have */
#define NO_FENCE                      (without==40)
#define MEMORY_ALONE                  (without==41)
#define GIVEN_BEFORE_IT_IS_OPEN       (without==42)

/* ---- the directory: what system calls see ---- */
byte rec = NONE;                /* the record: the worker it names */
byte lock = NONE;               /* flock on owners.lock: its holder */
bool life[N];                   /* flock on the life file */
bool sock[N];                   /* the private socket accepts */
byte fails;                     /* how many system calls may still fail (no room, no descriptors) */

/* ---- each worker ---- */
bool alive[N];                  /* it runs */
bool pub[N];                    /* the public socket accepts */
bool drained[N];                /* takes nothing more from others [routing/worker.py Worker.drained] */
bool loop[N];                   /* inside a block without an await */
bool mine[N];                   /* Entry.owned */
byte srv[N];                    /* Entry.serving */
byte fence[N];                  /* Entry.fenced */
byte clients[N];                /* clients' requests in it: a server that stops lets them end before its app hears of it */
byte taking[N];                 /* Entry.taking */
byte st[N];                     /* the session's state here: 0, or an incarnation */
bool pend[N];                   /* released but for its record [Ownership._pending] */

/* ---- ghosts: only the checks look at them ---- */
byte handlers[N];
byte truth;                     /* the incarnation that is the session's; 0: it ended, or never began */
byte inc;
byte live_work;
bool known = true;              /* a client has the ID */
bool unheard;                   /* no client will ever have it */
bool v_split, v_hollow, v_two, v_bare, v_gone, v_stuck, v_lock, v_replaced;

#define CHECK(n,v)  assert(!(v) || (only!=0 && only!=n))
#define ANY(f)      (f(0) || f(1) || f(2))
#define TWO(f)      ((f(0)&&f(1)) || (f(0)&&f(2)) || (f(1)&&f(2)))
#define OTHER(w)    ((w!=0 && handlers[0]>0) || (w!=1 && handlers[1]>0) || (w!=2 && handlers[2]>0))
#define PICK(x)     if :: x=0 :: x=1 :: x=2 fi
#define BEL(w)      (alive[w] && mine[w] && !loop[w])
#define BARE(w)     (BEL(w) && rec!=w)
#define OPENAT(w)   (alive[w] && sock[w] && mine[w] && rec==w && st[w]!=0 && st[w]==truth)
#define HANDLES(w)  (alive[w] && handlers[w]>0)
#define STUCK(w)    (alive[w] && ((rec==w)!=mine[w] || (st[w]!=0 && (!mine[w] || st[w]!=truth)) || srv[w]>0 || fence[w]>0 || taking[w]>0 || pend[w] || (rec==w && st[w]==0)))
#define KEPT(w)     (life[w] && !alive[w])

inline invariants() { v_two = TWO(BEL); CHECK(3,v_two); v_bare = ANY(BARE); CHECK(4,v_bare) }
inline await_(w) { loop[w] = false; invariants() }
inline says_gone() { v_gone = ANY(OPENAT) || ANY(HANDLES); CHECK(5,v_gone) }

/* P1 and P2, where the app's handler starts */
inline start_handler(w) {
  v_split = OTHER(w); CHECK(1,v_split);
  v_hollow = (st[w]!=truth); CHECK(2,v_hollow);
  if :: st[w]==0 -> inc++; st[w]=inc; truth=inc :: else fi;
  handlers[w]++
}
inline end_handler(w) {
  if
  :: skip                                                       /* the session goes on */
  :: if :: st[w]==truth -> truth=0 :: else fi; st[w]=0          /* it ends, or nothing of it is kept */
  fi;
  handlers[w]--
}
/* the restored state, made ready by the restore's caller, becomes the session's; no handler may be running on what was there */
inline open_here(w) {
  v_split = OTHER(w); CHECK(1,v_split);
  v_replaced = (handlers[w]>0); CHECK(8,v_replaced);
  mine[w]=true; pend[w]=false; inc++; st[w]=inc; truth=inc
}
/* [directory/ownership.py Ownership._remove], in a block: look, unlink, forget */
inline remove(w) {
  o = rec;
  if
  :: AWAIT_INSIDE_RELEASE -> atomic { await_(w) }; atomic { !loop[w] -> loop[w]=true }
  :: else
  fi;
  if
  :: o==w -> atomic {
       if
       :: rec=NONE; pend[w]=false                                /* unlink */
       :: fails>0 -> fails--; pend[w]=!FAILED_UNLINK_IS_FORGOTTEN
       fi }
  :: else -> pend[w]=false
  fi;
  atomic { mine[w]=false; await_(w) }
}

/* ------------------------------------------------------------------ a request that names the session [routing/route.py] */
proctype Req() {
  byte at, cur, o=NONE, looks=0; bool ok, begins=true, peer=false, placed=false;
  atomic { (known || unheard || !alive[0]) -> if :: !known -> goto fin :: else fi };
  atomic {
    PICK(at); cur=at;
    if :: !pub[at] -> goto fin :: else -> clients[at]=clients[at]+stop fi;
    if :: refuse -> if :: skip :: begins=false fi :: else fi
  };
  { cur=at;
look:                                                            /* enter: see that it is ours, look, count, in one block */
    atomic { !loop[cur] ->
      if
      :: peer && drained[cur] -> goto notmine
      :: peer && HANDLED_WHERE_IT_ARRIVES && !drained[cur] -> loop[cur]=true; srv[cur]++; goto handle
      :: else -> loop[cur]=true
      fi;
      if
      :: mine[cur] && (rec==cur || MEMORY_ALONE) && fence[cur]==0 ->
           if :: AWAIT_BETWEEN_LOOK_AND_COUNT -> loop[cur]=false; goto counted
              :: else -> srv[cur]=srv[cur]+(1-NOT_COUNTED); goto handle fi
      :: mine[cur] && rec==cur && fence[cur]>0 -> loop[cur]=false; goto out                    /* 503 */
      :: else
      fi };
    atomic {                                                     /* look, decide [routing/decision.py] */
      o=rec;
      if
      :: o==cur && !mine[cur] && SERVED_BEFORE_IT_IS_OPEN -> srv[cur]++; goto handle
      :: o==cur && !SERVED_BEFORE_IT_IS_OPEN || o==cur && mine[cur] -> loop[cur]=false; goto out     /* moving: 503 */
      :: o!=cur && peer && !(placed && o==NONE) -> loop[cur]=false; goto notmine
      :: o==NONE && peer && placed -> skip                                                       /* placed: as if it had arrived here */
      :: o!=cur && !peer && o==NONE && !begins -> says_gone(); loop[cur]=false; goto out         /* nobody's, no start */
      :: o!=cur && !peer && o==NONE && begins -> skip
      :: o!=cur && !peer && o==NONE && begins && place && !placed -> placed=true; loop[cur]=false; goto send
      :: o!=cur && !peer && o!=NONE -> loop[cur]=false; goto forward
      fi };
    if :: ACQUIRED_AFTER_THE_HANDLER -> srv[cur]++; goto handle :: else fi;
    atomic { if :: rec==NONE -> rec=cur; ok=true :: else -> ok=false fi };                       /* symlink */
    atomic {
      if
      :: ok && fence[cur]==0 -> mine[cur]=true; srv[cur]=srv[cur]+(1-NOT_COUNTED); goto handle
      :: ok && fence[cur]>0 -> mine[cur]=true; if :: taking[cur]==0 -> goto rel :: else -> await_(cur); goto out fi   /* 503 */
      :: else -> await_(cur); looks++; if :: looks<LOOKS -> goto look :: else -> goto out fi     /* another was quicker */
      fi };
forward:                                                         /* connect, send the first frame */
    atomic { if :: sock[o] -> cur=o; peer=true; goto look :: else fi };
    if :: REFUSED_IS_GONE -> atomic { says_gone() }; goto out :: else fi;
    atomic { !loop[at] -> if :: rec==o -> says_gone(); goto out                                  /* 410 */
                             :: else -> looks++; if :: looks<LOOKS -> goto look :: else -> goto out fi fi };
send:                                                            /* placed: a worker that refuses has run nothing */
    atomic { PICK(o); if :: sock[o] && o!=at -> cur=o; peer=true; goto look :: else -> goto look fi };
notmine:
    atomic { cur=at; peer=false; looks++; if :: looks<LOOKS -> goto look :: else -> goto out fi };
counted:
    atomic { !loop[cur] -> loop[cur]=true; srv[cur]++ };
handle:
    atomic { start_handler(cur); await_(cur) };
    atomic { !loop[cur] ->
      loop[cur]=true; end_handler(cur); srv[cur]=srv[cur]-(1-NOT_COUNTED);
      if :: ACQUIRED_AFTER_THE_HANDLER -> if :: rec==NONE -> rec=cur :: else fi; mine[cur]=(rec==cur) :: else fi;
      if
      :: mine[cur] && srv[cur]==0 && st[cur]==0 && taking[cur]==0 -> goto rel                    /* nothing is held: at once */
      :: await_(cur); goto out                                                                   /* or in its window, by a sweep */
      fi };
rel:
    remove(cur)
  } unless { !alive[cur] };
out:
  atomic { if :: alive[at] -> clients[at]=clients[at]-stop :: else fi };
fin: live_work--
}

/* ------------------------------------------------------------------ a sweep [routing/sweeper.py] */
proctype Sweep() {
  byte w, o; bool ok;
  PICK(w);
  {
    atomic { !loop[w] ->
      if
      :: alive[w] && mine[w] && (srv[w]==0 || RELEASED_WHILE_SERVED) && taking[w]==0 && (st[w]==0 || RELEASED_WHILE_SERVED && srv[w]>0) -> loop[w]=true
      :: alive[w] && pend[w] && !mine[w] && taking[w]==0 -> loop[w]=true
      :: else -> goto fin
      fi };
    remove(w)
  } unless { !alive[w] };
fin: live_work--
}

/* ------------------------------------------------------------------ a give that goes on though its asker has hung up */
proctype LateGive(byte cur; byte to) {
  byte x;
  {
    atomic { (!loop[cur] && srv[cur]==0 && taking[cur]==0) -> loop[cur]=true; x=rec };
    if
    :: x==cur && mine[cur] -> atomic { mine[cur]=false; st[cur]=0; truth=MOVING; rec=to }
    :: else
    fi;
    atomic { fence[cur]--; await_(cur) }
  } unless { !alive[cur] };
  live_work--
}

/* ------------------------------------------------------------------ a restore at `to` [directory/restores.py, gives.py] */
proctype Restore(byte to) {
  byte cur, o=NONE, x, turns=0, asked=0; bool ok, gone=false /* its caller no longer waits: abandoned */, opened=false;
  cur=to;
  (known || unheard || !alive[0]);
  atomic { if :: !pub[to] -> goto fin :: else fi };
again:
  {
    if
    :: cur!=to -> atomic { cur=to; goto turn }                   /* the owner died: the ask broke */
    :: else -> atomic { !loop[to] -> taking[to]++ }
    fi;
turn:
    atomic { !loop[to] -> loop[to]=true; o=rec; turns++; if :: skip :: gone=true fi };           /* each turn begins with a look */
    if
    :: o==to && !mine[to] -> if :: gone -> goto settle :: else -> goto opens fi
    :: (o!=to || mine[to]) && (gone || turns>TURNS) -> goto settle
    :: o==NONE && !gone && turns<=TURNS ->
         atomic { if :: rec==NONE -> rec=to; ok=true :: else -> ok=false fi };                   /* symlink */
         if :: ok -> goto opens :: else -> atomic { await_(to) }; goto turn fi
    :: o==to && mine[to] && !gone && turns<=TURNS ->              /* ours: fence, wait until nothing is served, look */
         if :: RESTORED_WITHOUT_DRAINING -> goto opens :: else fi;
         atomic { fence[to]++; await_(to) };
         atomic {
           if
           :: (!loop[to] && srv[to]==0) -> fence[to]--; loop[to]=true
           :: !loop[to] -> fence[to]--; gone=true; loop[to]=true; goto settle
           fi };
         atomic { x=rec; if :: mine[to] && x==to -> goto opens :: else -> await_(to); goto turn fi }
    :: o!=NONE && o!=to && !gone && turns<=TURNS -> skip
    fi;
    if                                                            /* is_dead: one test of the life lock */
    :: !life[o] || DEAD_IS_GUESSED -> skip
    :: life[o] -> goto ask
    fi;
    if :: TAKEN_WITHOUT_THE_LOCK -> goto locked :: else fi;
    atomic { await_(to) };
    atomic {
      if
      :: (!loop[to] && lock==NONE) -> lock=to; loop[to]=true
      :: !loop[to] -> loop[to]=true; goto settle                  /* not free in time: 503 */
      fi };
locked:
    x=rec;
    atomic { if :: x==o || TAKEN_WITHOUT_A_SECOND_LOOK -> rec=to :: else fi };                    /* rename */
    if :: lock==to -> lock=NONE :: else fi;
    if :: x==o || TAKEN_WITHOUT_A_SECOND_LOOK -> goto opens :: else -> atomic { await_(to) }; goto turn fi;
ask:
    atomic {
      await_(to);
      if :: asked==asks -> !loop[to] -> loop[to]=true; goto settle :: else -> asked++ fi;         /* 503 */
      if :: sock[o] -> cur=o :: else -> goto answered fi
    };
    /* at the owner: it gives, or says busy or not mine */
    atomic { !loop[cur] -> if :: !mine[cur] && taking[cur]==0 -> goto answered :: else -> fence[cur]=fence[cur]+(1-NO_FENCE) fi };
    if
    :: ASK_CUT_BEFORE_ITS_ANSWER -> atomic { run LateGive(cur,to); live_work++; goto answered }
    :: else
    fi;
    atomic {
      if
      :: (!loop[cur] && (srv[cur]==0 || GIVEN_WHILE_SERVED) && (taking[cur]==0 || GIVEN_BEFORE_IT_IS_OPEN)) -> loop[cur]=true
      :: !loop[cur] -> fence[cur]=fence[cur]-(1-NO_FENCE)*(1-FENCE_STAYS_AFTER_BUSY); goto answered   /* its time is up, or the asker hung up: busy */
      :: OPENED_AT_THE_DEADLINE && alive[to] && !loop[to] -> rec=to; loop[to]=true; cur=to; goto opens
      fi };
    x=rec;
    if
    :: x==cur && mine[cur] || GIVEN_WITHOUT_A_LOOK ->
         atomic {                                                 /* forget, drop, */
           mine[cur]=FORGOTTEN_AFTER_THE_GIVE;
           if :: STATE_KEPT_BY_THE_GIVER -> skip :: else -> st[cur]=0 fi; truth=MOVING };
         atomic {                                                 /* rename */
           if
           :: rec=to; x=NONE
           :: fails>0 -> fails--; x=cur                           /* it failed: without a record the asker opens */
           fi };
         if :: x==cur && !FAILED_GIVE_KEEPS_THE_RECORD -> atomic { rec=NONE; truth=0 } :: else fi;
         if :: FORGOTTEN_AFTER_THE_GIVE -> atomic { await_(cur) }; atomic { !loop[cur] -> loop[cur]=true; mine[cur]=false } :: else fi
    :: else
    fi;
    atomic { fence[cur]=fence[cur]-(1-NO_FENCE); await_(cur) };
answered:                                                         /* however it ended, look again */
    atomic { cur=to; if :: NO_LAST_LOOK -> if :: gone=true :: skip fi :: else fi };
    if :: NO_LAST_LOOK && gone -> atomic { !loop[to] -> taking[to]--; goto fin } :: else fi;
    goto turn;
opens:                                                            /* in the block of a look that found the record ours */
    atomic { if :: !gone -> open_here(to); opened=true :: else fi };
settle:                                                           /* [Restores._settle] */
    atomic {
      taking[to]--;
      if
      :: taking[to]==0 && !mine[to] && !ABANDONED_KEEPS_THE_RECORD -> skip
      :: taking[to]==0 && mine[to] && !opened && srv[to]==0 && st[to]==0 -> skip
      :: else -> await_(to); goto fin
      fi };
    atomic { if :: rec==to && truth==MOVING -> truth=0 :: else fi };  /* given to nobody: the session is let go, as its restore was */
    remove(to)
  } unless { !alive[cur] };
  if :: cur!=to -> goto again :: else fi;
fin: live_work--
}

/* ------------------------------------------------------------------ compaction, in a thread [directory/compaction.py] */
proctype Compact() {
  byte w, x, o; bool ok=true;
  PICK(w);
  {
    o = rec;                                                      /* the survey */
    if :: o==NONE -> goto fin :: else fi;
    if :: FOUND_DEAD_AFTER_THE_LOOK -> skip :: life[o] && !FOUND_DEAD_AFTER_THE_LOOK -> goto fin :: else fi;
    atomic { if :: COMPACTED_WITHOUT_THE_LOCK -> skip :: lock==NONE && !COMPACTED_WITHOUT_THE_LOCK -> lock=w :: else -> goto fin fi };
    x = rec;
    if
    :: x==NONE -> ok=false
    :: x!=NONE && FOUND_DEAD_AFTER_THE_LOOK -> ok = !life[x]
    :: x!=NONE && !FOUND_DEAD_AFTER_THE_LOOK -> ok = (x==o)
    fi;
    if :: ok -> atomic { rec=NONE; truth=0; invariants() } :: else fi;      /* unlink: the session is nobody's now, and said so */
    if :: lock==w -> lock=NONE :: else fi
  } unless { !alive[w] };
fin: live_work--
}

/* ------------------------------------------------------------------ a worker's end */
inline dies(w) {
  alive[w]=false; sock[w]=false; pub[w]=false; loop[w]=false; mine[w]=false; srv[w]=0; handlers[w]=0; st[w]=0; fence[w]=0; taking[w]=0; pend[w]=false; drained[w]=false; clients[w]=0
}
inline lets_go(w) {
  if :: LIFE_KEPT_BY_A_CHILD -> skip :: else -> life[w]=false fi;
  if :: lock==w && !LOCK_SURVIVES_ITS_HOLDER -> lock=NONE :: else fi
}
proctype Crash() {
  byte w;
  PICK(w);
  if
  :: atomic { alive[w] -> dies(w) }; atomic { lets_go(w) }
  :: skip
  fi;
  live_work--
}
proctype Stop(byte w) {                                           /* [routing/middleware.py aclose, routing/worker.py drain, aclose] */
  {
    atomic { pub[w]=false };
    if :: LIFE_LET_GO_BEFORE_THE_LAST -> life[w]=false :: else fi;
    if :: SOCKET_CLOSED_BEFORE_THE_LAST -> sock[w]=false :: else fi;
    atomic { clients[w]==0 -> drained[w]=true };
    atomic { (!loop[w] && srv[w]==0) -> sock[w]=false };
    atomic { (!loop[w] && taking[w]==0 && srv[w]==0) -> dies(w) }
  } unless { !alive[w] };
  atomic { lets_go(w) };
  live_work--
}
proctype Start(byte w) {
  if :: !LIFE_LOCKED_AFTER_START -> life[w]=true :: else fi;
  atomic { alive[w]=true; sock[w]=true; pub[w]=true };
  if :: LIFE_LOCKED_AFTER_START -> atomic { if :: alive[w] -> life[w]=true :: else fi } :: else fi;
  live_work--
}

/* ------------------------------------------------------------------ a request that names a worker, and no session */
proctype Mint() {
  byte at, cur, o; bool ok;
  atomic { PICK(at); if :: !pub[at] -> goto fin :: else fi; cur=at };
  {
    if :: cur!=0 -> atomic { if :: sock[0] -> cur=0 :: else -> goto fin fi } :: else fi;         /* refused: gone, nothing ran */
    atomic { !loop[0] -> if :: drained[0] && at!=0 -> goto fin :: else fi; handlers[0]++; inc++; st[0]=inc; truth=inc };
    if :: ID_LEAVES_BEFORE_ITS_RECORD -> known=true :: else fi;
    atomic { !loop[0] -> loop[0]=true };
    atomic { if :: rec==NONE -> rec=0; ok=true :: else -> ok=false fi };                          /* symlink */
    atomic { if :: ok -> mine[0]=true; srv[0]++ :: else -> handlers[0]--; st[0]=0; await_(0); goto fin fi; await_(0) };
    known=true;                                                   /* the reply leaves */
    atomic { !loop[0] -> handlers[0]--; srv[0]-- }
  } unless { !alive[cur] || !alive[0] };
fin:
  atomic { unheard=!known; live_work-- }
}

c_decl { \#include <stdlib.h>
  static int given(const char *name, int standard) { const char *text = getenv(name); return text ? atoi(text) : standard; } }

init {
  byte i=0, o;
  atomic {
    c_code {
      without = given("WITHOUT", 0); only = given("ONLY", 0); requests = given("REQUESTS", 1); sweeps = given("SWEEPS", 1);
      restores = given("RESTORES", 1); crashes = given("CRASHES", 1); compactions = given("COMPACTIONS", 0);
      asks = given("ASKS", 2); first = given("FIRST", 0); refuse = given("REFUSE", 0); stop = given("STOP", 0);
      start = given("START", 0); mint = given("MINT", 0); place = given("PLACE", 0); now.fails = given("FAILS", 0);
    };
    do :: i<N -> if :: !(start && i==2) -> alive[i]=true; sock[i]=true; pub[i]=true; life[i]=true :: else fi; i++ :: else -> break od;
    if :: first!=NONE -> rec=first; mine[first]=true; inc=1; st[first]=1; truth=1 :: else fi;
    live_work = requests + sweeps + restores + crashes + compactions;
    i=0; do :: i<requests -> run Req(); i++ :: else -> break od;
    i=0; do :: i<sweeps -> run Sweep(); i++ :: else -> break od;
    i=0; do :: i<restores -> run Restore(i+1); i++ :: else -> break od;
    i=0; do :: i<crashes -> run Crash(); i++ :: else -> break od;
    i=0; do :: i<compactions -> run Compact(); i++ :: else -> break od;
    if :: stop -> live_work++; run Stop(0) :: else fi;
    if :: start -> live_work++; run Start(2) :: else fi;
    if :: mint -> live_work++; known=false; run Mint() :: else fi;
    i=0
  };
  atomic { (live_work==0 && _nr_pr==1) ->
    v_lock = (lock!=NONE) || ANY(KEPT); CHECK(7,v_lock);
    /* one more sweep at each live worker, of what has ended and what could not be removed; then the books must agree */
    do
    :: i<N ->
       if
       :: alive[i] && (pend[i] || mine[i] && st[i]==0 && srv[i]==0) -> if :: rec==i -> rec=NONE :: else fi; mine[i]=false; pend[i]=false
       :: else
       fi;
       i++
    :: else -> break
    od;
    v_stuck = ANY(STUCK); CHECK(6,v_stuck)
  }
}
