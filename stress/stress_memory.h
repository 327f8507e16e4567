/*
 * stress_memory.h - the memory under test: filled on its stream with words that say whose they are, and looked at there
 * before it is freed or written again, and by who was given it. Nothing waits on the host.
 *
 *   word      of four bytes, at a place of an allocation: a mixture of the allocation's number, its generation (how
 *             often it was written) and the place. So memory that was handed out twice, lost, or mapped elsewhere
 *             holds other words, and who wrote them can be found
 *   sample    VERIFY_EDGES: the first 64 bytes of each page of the allocation, and its last 64. VERIFY_FULL: all
 *   finding   a word that was not as expected
 *
 * On a real GPU kernels fill and check, given as PTX, which the driver compiles; a check writes what it finds to
 * host memory that the device sees. A stream can be made late, which widens the windows between threads. On the
 * simulated GPU samples are copied to and from host memory, and a host function compares.
 *
 * Threads: a memory is made and ended by one thread; each thread has a probe of its own, and uses it alone, but that
 * host functions of its streams write to it.
 */
#ifndef VPMM_STRESS_MEMORY_H
#define VPMM_STRESS_MEMORY_H

#include "target.h"

typedef enum verify_mode { VERIFY_FULL, VERIFY_EDGES, VERIFY_OFF } verify_mode;

typedef struct block {
    CUdeviceptr address; /* 0: none */
    size_t bytes;
    uint64_t number;     /* of the allocation; never the same twice in a run */
    uint32_t generation; /* of what is written in it */
} block;

typedef struct finding {
    uint64_t number, place; /* place: which word */
    uint32_t generation, expected, found;
    uint32_t reserved;
} finding;

enum { FINDINGS = 8 }; /* that a probe keeps; more are counted */

typedef struct stress_memory stress_memory;
typedef struct probe probe;

/* False: told. The gpu outlives it. */
bool memory_open(gpu *, verify_mode, size_t page_size, stress_memory **);
void memory_close(stress_memory *); /* NULL is a no-op */

probe *probe_open(stress_memory *); /* NULL: no host memory; told */
void probe_close(probe *);          /* its streams have been synchronised. NULL is a no-op */

enum { PROBE_BLOCKS = 16 };

/* At most PROBE_BLOCKS at once, queued on the stream. */
CUresult probe_fill(probe *, const block *, unsigned n, CUstream);
CUresult probe_check(probe *, const block *, unsigned n, CUstream);

/* What is queued on the stream from here on begins so much later. */
CUresult probe_delay(probe *, unsigned us, CUstream);

/* Of the checks that have run: complete once the streams were synchronised. */
uint32_t probe_mismatches(const probe *);
size_t probe_findings(const probe *, finding[FINDINGS]);
uint64_t probe_bytes(const probe *); /* that checks have looked at, or will */

/* How often a check of so many bytes looks at the word at this place; 0: nor does a fill write it. */
unsigned memory_looks(const stress_memory *, size_t bytes, uint64_t place);

/* What stands at a place of such a block after a fill that writes it. */
uint32_t memory_word(uint64_t number, uint32_t generation, uint64_t place);

/* ---- stress_trial.c ---- */

/*
 * Fills and checks memory of its own: each word that is to be written is, each bit that is flipped is found. False: not
 * so, or the driver refuses; told. VERIFY_OFF has nothing to be tried.
 */
bool memory_try(gpu *, stress_memory *, size_t page_size);

#endif
