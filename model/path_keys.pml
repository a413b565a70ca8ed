/* Path keys: one key, two sessions that share it, two workers: starts that are placed, stops, closes, and a restore of both.
 * A third worker may have the key from an earlier start: THIRD=1: it is dead; THIRD=2: it lives, with a session of its own, and may
 * die at any moment.
 *
 * A start acquires its session key, then the path key, in one block; where another live worker owns the path key, it undoes
 * the session key and places the start there; a dead worker's key it takes. The owner counts the sessions of its path key, and releases it with the last.
 * A stop knows only the path key. A restore moves sessions one by one: the giver lets go of their keys in the block that
 * gives them, and none of them runs before all have come and hold the path key, or else all are let go again.
 * [routing/route.py, routing/path_keys.py, routing/install.py given_away]
 *
 * Run by `python model/check.py`; see README.md.
 */
#define NONE 9
hidden byte without, only, stops, restores, crashes, seeds, third;

#define KEY_FREED_BY_THE_FIRST_CLOSE (without==1)
#define KEPT_THOUGH_THE_KEY_IS_OTHERS (without==2)
#define KEY_ACQUIRED_AFTER_THE_START (without==3)
#define SESSION_KEY_NOT_UNDONE       (without==4)
#define RESTORED_WITHOUT_ITS_KEY     (without==5)
#define GIVER_KEEPS_THE_KEY          (without==6)
#define RUNS_BEFORE_ALL_HAVE_COME    (without==7)
#define STOP_HANDLED_WHERE_IT_LANDS  (without==8)
#define TAKEN_WITHOUT_A_SECOND_LOOK  (without==9)
#define TAKEN_WITHOUT_THE_LOCK       (without==10)
#define TAKEN_FROM_THE_LIVING        (without==11)

byte recP = NONE;               /* the path key's record */
byte recS[2];                   /* the sessions' records */
byte lock = NONE;
bool alive[3];
bool loop[3];
byte refs[3];                   /* PathKeys._bound */
bool bound[2];                  /* the session is bound to the key, at the worker that has it */
byte openat[2];                 /* the worker that runs the session; NONE: no stop could miss it */
byte runs[2];                   /* how often it was started; a restored one goes on */
byte live_work;
bool there;                     /* the third worker's session runs */
bool v_path, v_missed, v_left;
#define CHECK(n,v)  assert(!(v) || (only!=0 && only!=n))
#define LOST(s)     (openat[s]!=NONE && !loop[openat[s]] && recP!=openat[s])
#define LEFT(s)     (recS[s]!=NONE && alive[recS[s]] && openat[s]!=recS[s])
inline stops_reach() { v_path = LOST(0) || LOST(1) || (there && recP!=2); CHECK(1,v_path) }
inline await_(w) { loop[w]=false; stops_reach() }
inline unbind(w,s) {            /* [PathKeys.unbind], in a block: the key goes with its last session */
  atomic {
    if
    :: bound[s] -> bound[s]=false; refs[w]--; if :: refs[w]==0 || KEY_FREED_BY_THE_FIRST_CLOSE -> x=recP :: else -> x=NONE fi
    :: else -> x=NONE
    fi };
  if :: x==w -> recP=NONE :: else fi
}

/* A dead worker's key: found dead (`y`), then the lock, then looked at again. `x` is whose it is then; NONE: 503, or look again.
   [PathKeys._take, OwnersOverRecords._take_in_block] */
inline take(w) {
  y=x;
  if
  :: TAKEN_WITHOUT_THE_LOCK -> skip
  :: else -> atomic { if :: lock==NONE -> lock=w :: else -> x=NONE fi }
  fi;
  if
  :: x!=NONE ->
       if
       :: TAKEN_WITHOUT_A_SECOND_LOOK -> recP=w; x=w
       :: else -> x=recP; if :: x==y -> recP=w; x=w :: else fi
       fi;
       if :: lock==w -> lock=NONE :: else fi
  :: else
  fi
}

proctype Seed(byte s) {
  byte at, cur, x, y, looks=0; bool placed=false;
  atomic { if :: at=0 :: at=1 fi; cur=at };
  { cur=at;
look:
    atomic { !loop[cur] -> loop[cur]=true; x=recS[s];
      if
      :: x!=NONE -> loop[cur]=false; goto fin                     /* there is such a session: the start is a repeated one */
      :: else
      fi };
    atomic { if :: recS[s]==NONE -> recS[s]=cur :: else -> loop[cur]=false; goto fin fi };          /* symlink, session key */
    if :: KEY_ACQUIRED_AFTER_THE_START -> atomic { openat[s]=cur; runs[s]++; await_(cur) }; atomic { !loop[cur] -> loop[cur]=true } :: else fi;
    atomic { if :: recP==NONE -> recP=cur; x=cur :: else -> x=NONE fi };                            /* symlink, path key */
    if :: x==NONE -> x=recP :: else fi;                                                            /* EEXIST: look */
    if
    :: x!=NONE && x!=cur && (!alive[x] || TAKEN_FROM_THE_LIVING) -> take(cur)                      /* a dead worker's runs nowhere */
    :: else
    fi;
    if
    :: x==cur || KEPT_THOUGH_THE_KEY_IS_OTHERS || KEY_ACQUIRED_AFTER_THE_START -> goto opens
    :: else
    fi;
    if :: SESSION_KEY_NOT_UNDONE -> skip :: else -> recS[s]=NONE fi;                                /* undo */
    atomic {
      loop[cur]=false; looks++;
      if :: x==NONE || placed || looks==3 -> goto back :: else fi;                                 /* not mine, or look again */
      if :: alive[x] -> cur=x; placed=true; goto look                                              /* placed: as if it had arrived there */
         :: else -> goto fin fi                                                                   /* a dead worker's: gone */
    };
back:
    atomic { if :: looks<3 -> cur=at; placed=false; goto look :: else -> goto fin fi };            /* else 503 */
opens:
    atomic {
      if :: x==cur -> refs[cur]++; bound[s]=true :: else fi;
      openat[s]=cur; runs[s]++; await_(cur) };
    /* its handler, its steps, then its close, at the worker that has it by then */
    if :: skip :: goto fin fi;                                                                     /* or nobody closes it */
    atomic { (!loop[cur] && (recS[s]!=cur || openat[s]==cur)) -> if :: recS[s]!=cur -> goto fin :: else -> loop[cur]=true; openat[s]=NONE fi };
    unbind(cur,s);
    recS[s]=NONE;                                                                                  /* unlink, session key */
    atomic { await_(cur) }
  } unless { !alive[cur] };
fin: live_work--
}

#define MISSED(s) (was[s]!=NONE && openat[s]!=NONE && openat[s]!=cur && runs[s]==before[s])
proctype Stops() {              /* a request that knows only the path key [routing/route.py _route_path_key] */
  byte at, cur, x, looks=0, was[2], before[2];
  atomic { if :: at=0 :: at=1 fi; cur=at; was[0]=openat[0]; was[1]=openat[1]; before[0]=runs[0]; before[1]=runs[1] };
  { cur=at;
look:
    atomic { !loop[cur] -> x=recP;
      if
      :: x==cur || x==NONE && cur==at || STOP_HANDLED_WHERE_IT_LANDS && cur!=at ->           /* handled, in the block of the look */
           v_missed = MISSED(0) || MISSED(1); CHECK(2,v_missed); goto fin
      :: x!=cur && cur!=at && !STOP_HANDLED_WHERE_IT_LANDS -> cur=at; looks++; if :: looks<3 -> goto look :: else -> goto fin fi   /* not mine */
      :: x!=NONE && x!=cur && cur==at -> skip
      fi };
    if
    :: alive[x] -> atomic { cur=x; goto look }
    :: else -> atomic { !loop[at] -> if :: recP==x -> goto fin :: else -> looks++; if :: looks<3 -> goto look :: else -> goto fin fi fi }   /* gone */
    fi
  } unless { !alive[cur] };
fin: live_work--
}

proctype Restore() {            /* of both sessions, to worker 1 */
  byte cur=1, s=0, x, y, o; bool whole=true, came[2];
again:
  {
    if :: cur!=1 -> atomic { cur=1; whole=false; goto next } :: else fi;
    do
    :: s<2 ->
       atomic { !loop[1] -> loop[1]=true; o=recS[s] };
       if
       :: o==NONE -> atomic { if :: recS[s]==NONE -> recS[s]=1; came[s]=true :: else -> whole=false fi; loop[1]=false }
       :: o==1 -> atomic {
            if :: openat[s]==1 -> openat[s]=NONE; came[s]=true :: else -> whole=false fi; loop[1]=false }       /* ours: drained */
       :: o==0 && !alive[0] -> atomic { recS[s]=1; came[s]=true; loop[1]=false }                   /* a dead worker's, under the lock */
       :: o==0 && alive[0] ->
            atomic { loop[1]=false; cur=0 };
            atomic { !loop[0] -> if :: recS[s]==0 && openat[s]==0 -> loop[0]=true :: else -> cur=1; whole=false; goto next fi };
            openat[s]=NONE;                                                                        /* drained; look, forget, drop, */
            if :: GIVER_KEEPS_THE_KEY -> skip :: else -> unbind(0,s) fi;                           /* with it the path key, */
            recS[s]=1;                                                                             /* rename */
            atomic { await_(0); cur=1; came[s]=true }
       fi;
       if :: RUNS_BEFORE_ALL_HAVE_COME && came[s] -> atomic { !loop[1] -> loop[1]=true }; atomic { if :: recP==NONE -> recP=1 :: else fi };
              atomic { if :: recP==1 && !bound[s] -> refs[1]++; bound[s]=true :: else fi; openat[s]=1; await_(1) }
          :: else fi;
next:  s++
    :: else -> break
    od;
    if :: RUNS_BEFORE_ALL_HAVE_COME -> goto over :: else fi;
    atomic { !loop[1] -> loop[1]=true };
    if :: whole && !RESTORED_WITHOUT_ITS_KEY ->
         atomic { if :: recP==NONE -> recP=1; y=1 :: else -> y=NONE fi };                          /* symlink, path key */
         if :: y==NONE -> y=recP :: else fi;
         if :: y!=1 && y!=NONE ->
              if :: !alive[y] -> x=y; take(1); y=x :: else fi
            :: else fi;
         whole=(y==1)
       :: else
    fi;
    atomic {
      s=0;
      do
      :: s<2 && came[s] && whole -> if :: !bound[s] && recP==1 -> refs[1]++; bound[s]=true :: else fi; openat[s]=1; s++
      :: s<2 && !(came[s] && whole) -> s++
      :: s>=2 -> break
      od;
      s=0 };
    do
    :: s<2 -> if :: came[s] && !whole -> unbind(1,s); recS[s]=NONE :: else fi; s++                /* let go again */
    :: else -> break
    od;
    atomic { await_(1) };
over: skip
  } unless { !alive[cur] };
  if :: cur!=1 && alive[1] -> goto again :: else fi;
  live_work--
}

c_decl { \#include <stdlib.h>
  static int given(const char *name, int standard) { const char *text = getenv(name); return text ? atoi(text) : standard; } }

init {
  byte w;
  atomic {
    c_code { without = given("WITHOUT", 0); only = given("ONLY", 0); stops = given("STOPS", 1); restores = given("RESTORES", 0); crashes = given("CRASHES", 1); seeds = given("SEEDS", 2); third = given("THIRD", 0); };
    alive[0]=true; alive[1]=true; recS[0]=NONE; recS[1]=NONE; openat[0]=NONE; openat[1]=NONE;
    if :: third>0 -> recP=2; refs[2]=1; alive[2]=(third==2); there=(third==2) :: else fi;
    live_work = seeds + stops + restores + crashes;
    run Seed(0); if :: seeds==2 -> run Seed(1) :: else fi;
    w=0; do :: w<stops -> run Stops(); w++ :: else -> break od;
    if :: restores>0 -> run Restore() :: else fi;
    w=0
  };
  if
  :: crashes>0 ->
       if :: w=0 :: w=1 :: third==2 -> w=2 fi;
       if
       :: atomic { alive[w]=false; loop[w]=false; refs[w]=0; if :: lock==w -> lock=NONE :: else fi; if :: w==2 -> there=false :: else fi; if :: openat[0]==w -> openat[0]=NONE :: else fi; if :: openat[1]==w -> openat[1]=NONE :: else fi;
                   if :: recS[0]==w -> bound[0]=false :: else fi; if :: recS[1]==w -> bound[1]=false :: else fi }
       :: skip
       fi;
       live_work--
  :: else
  fi;
  atomic { (live_work==0 && _nr_pr==1) ->                /* every record names a dead worker, or one where its session runs */
    v_left = ((recP!=NONE && recP!=2 && alive[recP] && openat[0]!=recP && openat[1]!=recP) || LEFT(0) || LEFT(1));
    CHECK(3,v_left) }
}
