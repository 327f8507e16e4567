/*
 * captures.h - when the program captures: meanwhile, and while it begins to, nobody but a stream's own calls touches
 * it.
 *
 *   underway   captures that the program has begun, or is about to begin, and has not ended
 *   inside     threads that record on a stream which their request was not for (vpmm_capture_gate)
 *              nobody comes in while underway > 0, and a capture begins when inside = 0
 *
 * Who comes in counts itself and then looks at underway; who begins counts its capture and then waits for those inside
 * (all sequentially consistent): one of the two sees the other. Those inside wait for nobody, and are out after a few
 * calls of the driver.
 *
 * A capture that ends otherwise than by cuStreamEndCapture, with its stream or its context, counts for good: nobody
 * comes in any more, and all is as without a gate. So it is from where a stream's handle goes that vpmm has not let go
 * of.
 */
#ifndef VPMM_PRELOAD_CAPTURES_H
#define VPMM_PRELOAD_CAPTURES_H

#include <vpmm/vpmm.h>

extern const vpmm_capture_gate captures_gate;

/* Nobody is inside any more, and nobody comes in. */
void captures_shut_for_good(void);

#endif
