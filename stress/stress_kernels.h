/*
 * stress_kernels.h - the kernels that fill and check memory on a real GPU, and let a stream wait, as PTX that the
 * driver compiles when the program starts: no CUDA compiler is needed, and every GPU from compute capability 7.0 on
 * runs them.
 *
 * A launch works on several pieces of memory, for a launch takes longer than most allocations: with one for each
 * allocation threads would wait for one another in launches. A piece is rows of words, a pitch apart, from the word
 * `first` of an allocation on; base is aligned to 16 bytes, and first and pitch are multiples of four words; rows and
 * width are not 0. Each piece has as many of the launch's blocks as its part of all words, from `first_block` on:
 * `columns` for a row at a time, and `rows_at_once` rows are worked on at once. The check counts mismatches in a report
 * in pinned host memory, and writes the first few there: atomic additions of one device to such memory are atomic among
 * its own threads.
 */
#ifndef VPMM_STRESS_KERNELS_H
#define VPMM_STRESS_KERNELS_H

#include "target.h"

/* A word is (place * STRIDE + key), mixed: w = (w ^ w >> 15) * FACTOR; w ^ w >> 13. */
#define KERNEL_STRIDE UINT32_C(0x9E3779B1)
#define KERNEL_FACTOR UINT32_C(0x85EBCA6B)

/* Of the report: a count of 32 bits, and from here on findings. */
enum { KERNEL_FIRST_FINDING = 8, KERNEL_FINDING_BYTES = 32, KERNEL_FINDINGS = 8 };

enum { KERNEL_PIECES = 32 };

struct kernel_piece {
    uint64_t base, first, rows, pitch, width, number;
    uint32_t key, generation;
    uint32_t first_block; /* this and the next two: the launch's to choose */
    uint16_t columns, rows_at_once;
};

struct kernels {
    CUmodule module;
    CUfunction fill, check, wait;
    CUresult(CUDAAPI *launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              CUstream, void **, void **);
    CUresult(CUDAAPI *unload)(CUmodule);
};

/* In the gpu's context, which is current. False: told. */
bool kernels_open(const gpu *, struct kernels *);
void kernels_close(struct kernels *); /* zeros are a no-op */

/* n: at most KERNEL_PIECES. The report is of the check alone. */
CUresult kernels_launch(const struct kernels *, bool check, const struct kernel_piece *, unsigned n, uint64_t report,
                        CUstream);

/* The stream does nothing for so long; the rest of the device goes on. */
CUresult kernels_wait(const struct kernels *, uint64_t ns, CUstream);

#endif
