/*
 * piece.h - requests that are cut from pages: of less than a page, and of up to seven that a whole number of pages
 * would waste more than an eighth of.
 *
 *   piece     a slice (of up to 64 KiB; slab.h) or a region of subpages (cut.h)
 *
 * malloc, from cheapest to dearest: the thread's cache; a slab or a free region of subpages that the stream may use
 * without waiting; the same after the stream's caches have given what they have; a free page, cut; what has passed by
 * now, or can be waited for; a page that is built. free: into the thread's cache, or to all behind a fence.
 */
#ifndef VPMM_LIB_PIECE_H
#define VPMM_LIB_PIECE_H

#include "remap/arena.h"

/*
 * From eight pages on, rounding up to pages wastes less than an eighth. Pieces of up to 15 and 31 pages, where rounding
 * would waste more than a 16th and a 32nd, were tried: the traces (resnet_train and two Llamas, four scales) held as
 * much of what they asked for or more, by up to 0.013, because free subpages lie scattered, and a first pass of
 * resnet_train took up to five times as long, for each page of a piece has a handle of its own. It helps no more in the
 * training of a ResNet-50 and a Llama by stress/pytorch_training.py, which asks for much that is a quarter or an eighth
 * of a page more than whole pages (two passes, five scales, held over what was asked for): 1.074 and 1.049 as it is;
 * 1.076 and 1.048 where just an eighth would be wasted; 1.091 and 1.052 up to 15 pages; 1.098 and 1.052 up to 31; in
 * handles of four pages up to 15, 1.100 and 1.048. Nor does it help to map what a piece misses right behind a free run
 * of subpages. To cut every request from pages holds 1.03, and moves a hundred handles in each step of training.
 * Smaller pages hold as little, and move none (stress/README.md, "Small pages").
 */
enum { PIECE_MAX_PAGES = 7 };

/*
 * Longer pages are not cut: the subpages of a region are counted in 26 bits (units.h), and those of a page of slabs in
 * 20 (slab_page.h).
 */
#define PIECE_PAGE_MAX ((size_t)8 << 30)

/* Whether a request is cut from pages. */
static inline bool piece_serves(const struct arena *arena, size_t bytes)
{
    size_t page = arena->space.units.unit_size, waste = -bytes & (page - 1);
    return bytes < arena->cut_below && (bytes < page || waste > (bytes + waste) / 8);
}

/* Past the hit. The thread is one of the stream's users. Errors as of tiers_take_pages; counted if it succeeds. */
vpmm_status piece_malloc(struct arena *, size_t bytes, struct stream *, CUdeviceptr *);

/* Whether the address lies in a page that is cut. */
bool piece_is_at(const struct arena *, CUdeviceptr);

/* Likewise. INVALID_POINTER: no live piece begins there. */
vpmm_status piece_free(struct arena *, CUdeviceptr, struct stream *);

/* Of a live piece, which a further stream uses too (space/use.h). INVALID_POINTER, HOST_MEMORY. */
vpmm_status piece_use(struct arena *, CUdeviceptr, struct stream *);

#endif
