/*
 * memory.h - what the rooms of the library share about memory: requests served, and requests tried again.
 */
#ifndef VPMM_PRELOAD_MEMORY_H
#define VPMM_PRELOAD_MEMORY_H

#include "served.h"

/* Gives the device of the current context what vpmm keeps free there, or every device's. True: it was something. */
bool memory_trim_current(void);

/* `call` once more if there was no memory, and vpmm could give some back. */
#define MEMORY_RETRIED(call)                                                                                           \
    ({                                                                                                                 \
        CUresult retried_ = (call);                                                                                    \
        if (retried_ == CUDA_ERROR_OUT_OF_MEMORY && memory_trim_current())                                             \
            retried_ = (call);                                                                                         \
        retried_;                                                                                                      \
    })

#endif
