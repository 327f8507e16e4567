#include "pool/find.h"

/* join and part do not align what they find: they are asked for `align - 1` units more. */
enum region_source find_free(struct space *space, struct stream *stream, struct want want, bool may_wait,
                             bool every_bin, struct region *region)
{
    uint64_t units = want.units + want.align - 1;
    enum region_source source = region_take(space, stream, want, every_bin, region);
    if (source == REGION_NONE)
        source = region_join(space, stream, units, region);
    if (source == REGION_NONE && region_take_part(space, stream, units, region))
        source = REGION_COMPLETED;
    if (source == REGION_NONE && may_wait &&
        region_take_freed_elsewhere(space, stream, want, every_bin, fence_waitable, region))
        source = REGION_WAITED;
    return source;
}

/* The bits of bins cannot spoil the last look. */
enum region_source find_thoroughly(struct space *space, struct stream *stream, struct want want, bool may_wait,
                                   struct region *region)
{
    enum { LAST_LOOKS = 3 };
    enum region_source source = find_free(space, stream, want, may_wait, false, region);
    for (int i = 0; source == REGION_NONE && i < LAST_LOOKS; i++) {
        uint64_t seen = load_sc_u64(&space->publications);
        source = find_free(space, stream, want, may_wait, true, region);
        if (load_sc_u64(&space->publications) == seen)
            break;
    }
    return source;
}
