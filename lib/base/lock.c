#include "base/lock.h"

#ifdef VPMM_DEBUG_CHECKS
static _Thread_local uint64_t taken;

void lock_count(void)
{
    taken++;
}

uint64_t vpmm_debug_locks(void)
{
    return taken;
}
#endif
