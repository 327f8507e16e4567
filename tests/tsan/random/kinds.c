/*
 * kinds.c - what rounds are made of. Each looks for one class of defect, and the first for all of them at once.
 */
#include "random.h"

#define WEIGHTS(...)    .weight = {__VA_ARGS__}
#define OF(name, times) [OPERATION_##name] = (times)

/* What belongs to every round. */
#define USUAL OF(exchange, 600), OF(trim, 1), OF(poll, 4), OF(look, 2)

const struct kind kinds[] = {
    {.name = "mix",
     .modes = MODE_ANY,
     .operations = 2000,
     WEIGHTS(USUAL, OF(overflow, 4), OF(hold, 4), OF(flash, 2), OF(renew, 4), OF(release, 2), OF(capture, 6),
             OF(exhaust, 1), OF(pool, 1), OF(life, 1))},
    /* Streams are destroyed without a word, with more frees behind their work than fences can be outstanding. */
    {.name = "eager",
     .modes = MODE_EAGER,
     .operations = 1000,
     WEIGHTS(USUAL, OF(hold, 5), OF(flash, 60), OF(renew, 40), OF(exhaust, 1))},
    /* Streams capture while other threads do all that they may, and while what they have freed is published. */
    {.name = "capture",
     .modes = MODE_ANY,
     .room = ROOM_AMPLE,
     .operations = 2000,
     WEIGHTS(USUAL, OF(hold, 5), OF(capture, 40), OF(renew, 2))},
    /* The same, while the pool takes everything back before it refuses a request. */
    {.name = "shortage",
     .modes = MODE_ANY,
     .room = ROOM_TIGHT,
     .operations = 1000,
     WEIGHTS(USUAL, OF(hold, 5), OF(capture, 40), OF(exhaust, 20))},
    /*
     * Streams are released while other threads' full caches, with memory of these streams, are halved. There is no cap:
     * before a refusal all caches are emptied, and what is stranded comes back.
     */
    {.name = "halve",
     .modes = MODE_CHECKED | MODE_TRUSTED,
     .room = ROOM_AMPLE,
     .small_caches = true,
     .operations = 1500,
     WEIGHTS(OF(exchange, 60), OF(overflow, 600), OF(poll, 2))},
    /* Streams are released while other threads call with them, and release them too. */
    {.name = "release", .modes = MODE_CHECKED | MODE_TRUSTED, .operations = 4000, WEIGHTS(USUAL, OF(release, 100))},
    /* Threads die, and leave more behind on their per-thread streams than they could mark. */
    {.name = "life", .modes = MODE_ANY, .operations = 1000, WEIGHTS(USUAL, OF(life, 10))},
    /* Pools end while streams capture. */
    {.name = "pool", .modes = MODE_ANY, .operations = 1500, WEIGHTS(USUAL, OF(capture, 30), OF(pool, 15))},
    /* Everything is in use, or freed and not yet passed. */
    {.name = "tight",
     .modes = MODE_ANY,
     .room = ROOM_TIGHT,
     .operations = 1500,
     WEIGHTS(USUAL, OF(hold, 10), OF(flash, 10), OF(renew, 10), OF(exhaust, 20))},
};

const size_t kinds_count = sizeof(kinds) / sizeof(kinds[0]);
