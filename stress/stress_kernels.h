/*
 * stress_kernels.h - the two kernels that fill and check memory on a real GPU, as PTX that the driver compiles when the
 * program starts: no CUDA compiler is needed, and every GPU from compute capability 7.0 on runs them.
 *
 * Work is rows of words, a pitch apart, from the word `first` of the block on; a launch's blocks share the rows (y) and
 * the words of a row (x). The check counts mismatches in a report in pinned host memory, and writes the first few
 * there: atomic additions of one device to such memory are atomic among its own threads.
 */
#ifndef VPMM_STRESS_KERNELS_H
#define VPMM_STRESS_KERNELS_H

#include "target.h"

/* A word is (place * STRIDE + key), mixed: w = (w ^ w >> 15) * FACTOR; w ^ w >> 13. */
#define KERNEL_STRIDE UINT32_C(0x9E3779B1)
#define KERNEL_FACTOR UINT32_C(0x85EBCA6B)

/* Of the report: a count of 32 bits, and from here on findings. */
enum { KERNEL_FIRST_FINDING = 8, KERNEL_FINDING_BYTES = 32, KERNEL_FINDINGS = 8 };

/* The kernels' parameters, in their order. */
struct kernel_work {
    uint64_t base, first, rows, pitch, width;
    uint64_t late_ns; /* the kernel waits so long before it begins: one of no rows, which does nothing else */
    uint64_t number, report;
    uint32_t key, generation;
};

struct kernels {
    CUmodule module;
    CUfunction fill, check;
    CUresult(CUDAAPI *launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              CUstream, void **, void **);
    CUresult(CUDAAPI *unload)(CUmodule);
};

/* In the gpu's context, which is current. False: told. */
bool kernels_open(const gpu *, struct kernels *);
void kernels_close(struct kernels *); /* zeros are a no-op */
CUresult kernels_launch(const struct kernels *, bool check, const struct kernel_work *, CUstream);

#endif
