/* Client requests to callgrind, for a Python program to make. */
#include <valgrind/callgrind.h>

void begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void end(void) {
    CALLGRIND_STOP_INSTRUMENTATION;
}

/* Between `begin` and `end`, with --collect-atstart=no: what is counted of it begins or ends here. */
void toggle(void) {
    CALLGRIND_TOGGLE_COLLECT;
}
