#define _GNU_SOURCE 1

#include "stress_kernels.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 256, MOST_BLOCKS = 1056 /* in a launch, and one for each piece */ };

/* clang-format off */

/* A word of its place times the stride, plus the key: see KERNEL_STRIDE. */
#define KERNEL_MIX(word) \
    "    shr.u32 %mix, " word ", 15;\n" \
    "    xor.b32 " word ", " word ", %mix;\n" \
    "    mul.lo.u32 " word ", " word ", 0x85EBCA6B;\n" \
    "    shr.u32 %mix, " word ", 13;\n" \
    "    xor.b32 " word ", " word ", %mix;\n"

#define KERNEL_FOUR_WORDS \
    "    mov.u32 %w0, %unmixed;\n" \
    "    add.u32 %w1, %w0, 0x9E3779B1;\n" \
    "    add.u32 %w2, %w1, 0x9E3779B1;\n" \
    "    add.u32 %w3, %w2, 0x9E3779B1;\n" \
    KERNEL_MIX("%w0") KERNEL_MIX("%w1") KERNEL_MIX("%w2") KERNEL_MIX("%w3")

#define KERNEL_ADVANCE \
    "    add.u64 %column, %column, %step;\n" \
    "    add.u32 %unmixed, %unmixed, %unmixed_step;\n" \
    "    add.u64 %at, %at, %at_step;\n"

/*
 * Of both kernels: the block's piece, and its place among the piece's blocks; then the rows, and the words of each,
 * four at a time, which a thread has in %w0 to %w3, at %at, %unmixed being what the first is mixed from. `four` is what
 * is done with them; `ahead` may do it with them and the next four, and go to NEXT, or leave them to `four`. What is
 * left of a row's words at its end has one thread, which does `one` with each, in %w0.
 */
#define KERNEL(name, ahead, four, one) \
    ".visible .entry " name "(.param .u64 report, .param .align 8 .b8 piece[2048])\n" \
    "{\n" \
    "    .reg .pred %p;\n" \
    "    .reg .b64 %from, %base, %first, %rows, %pitch, %width, %number, %row, %row_step, %place, %at, %at_step;\n" \
    "    .reg .b64 %fours, %begin, %column, %step, %next, %report;\n" \
    "    .reg .b32 %key, %generation, %block, %blocks, %columns, %thread, %threads;\n" \
    "    .reg .b32 %unmixed, %unmixed_step, %n, %nth, %mix, %w<4>, %f<4>, %g<4>;\n" \
    "    mov.u64 %from, piece;\n" \
    "    mov.u32 %block, %ctaid.x;\n" \
    "FIND:\n" \
    "    ld.param.u32 %blocks, [%from + 56];\n" \
    "    setp.lt.u32 %p, %block, %blocks;\n" \
    "    @%p bra FOUND;\n" \
    "    sub.u32 %block, %block, %blocks;\n" \
    "    add.u64 %from, %from, 64;\n" \
    "    bra FIND;\n" \
    "FOUND:\n" \
    "    ld.param.u64 %base, [%from];\n" \
    "    ld.param.u64 %first, [%from + 8];\n" \
    "    ld.param.u64 %rows, [%from + 16];\n" \
    "    ld.param.u64 %pitch, [%from + 24];\n" \
    "    ld.param.u64 %width, [%from + 32];\n" \
    "    ld.param.u64 %number, [%from + 40];\n" \
    "    ld.param.u32 %key, [%from + 48];\n" \
    "    ld.param.u32 %generation, [%from + 52];\n" \
    "    ld.param.u32 %columns, [%from + 60];\n" \
    "    mov.u32 %thread, %tid.x;\n" \
    "    mov.u32 %threads, %ntid.x;\n" \
    "    rem.u32 %n, %block, %columns;\n" \
    "    mad.lo.u32 %n, %n, %threads, %thread;\n" \
    "    cvt.u64.u32 %begin, %n;\n" \
    "    mul.lo.u32 %n, %threads, %columns;\n" \
    "    cvt.u64.u32 %step, %n;\n" \
    "    shl.b64 %at_step, %step, 4;\n" \
    "    shl.b32 %n, %n, 2;\n" \
    "    mul.lo.u32 %unmixed_step, %n, 0x9E3779B1;\n" \
    "    div.u32 %n, %block, %columns;\n" \
    "    cvt.u64.u32 %row, %n;\n" \
    "    div.u32 %n, %blocks, %columns;\n" \
    "    cvt.u64.u32 %row_step, %n;\n" \
    "    shr.u64 %fours, %width, 2;\n" \
    "ROW:\n" \
    "    setp.ge.u64 %p, %row, %rows;\n" \
    "    @%p bra END;\n" \
    "    mov.u64 %column, %begin;\n" \
    "    shl.b64 %place, %column, 2;\n" \
    "    add.u64 %place, %place, %first;\n" \
    "    mad.lo.u64 %place, %row, %pitch, %place;\n" \
    "    shl.b64 %at, %place, 2;\n" \
    "    add.u64 %at, %at, %base;\n" \
    "    cvt.u32.u64 %n, %place;\n" \
    "    mad.lo.u32 %unmixed, %n, 0x9E3779B1, %key;\n" \
    "FOUR:\n" \
    "    setp.ge.u64 %p, %column, %fours;\n" \
    "    @%p bra LAST;\n" \
    ahead \
    KERNEL_FOUR_WORDS \
    four \
    "NEXT:\n" \
    KERNEL_ADVANCE \
    "    bra FOUR;\n" \
    "LAST:\n" \
    "    setp.ne.u64 %p, %column, %fours;\n" \
    "    @%p bra NEXT_ROW;\n" \
    "    cvt.u32.u64 %n, %width;\n" \
    "    and.b32 %n, %n, 3;\n" \
    "ONE:\n" \
    "    setp.eq.u32 %p, %n, 0;\n" \
    "    @%p bra NEXT_ROW;\n" \
    "    mov.u32 %w0, %unmixed;\n" \
    KERNEL_MIX("%w0") \
    one \
    "NEXT_ONE:\n" \
    "    add.u64 %at, %at, 4;\n" \
    "    add.u32 %unmixed, %unmixed, 0x9E3779B1;\n" \
    "    sub.u32 %n, %n, 1;\n" \
    "    bra ONE;\n" \
    "NEXT_ROW:\n" \
    "    add.u64 %row, %row, %row_step;\n" \
    "    bra ROW;\n" \
    "END:\n" \
    "    ret;\n" \
    "}\n"

#define KERNEL_FILL_FOUR "    st.global.v4.u32 [%at], {%w0, %w1, %w2, %w3};\n"
#define KERNEL_FILL_ONE "    st.global.u32 [%at], %w0;\n"

/*
 * Counts a mismatch of %f and %w of this number, so many words behind %at, and writes it down if it is one of the
 * first. Beyond a hundred thousand they are not counted: each is a way to the host and back.
 */
#define KERNEL_REPORT(n, next) \
    "    ld.param.u64 %report, [report];\n" \
    "    ld.volatile.global.u32 %nth, [%report];\n" \
    "    setp.ge.u32 %p, %nth, 100000;\n" \
    "    @%p bra " next ";\n" \
    "    atom.global.add.u32 %nth, [%report], 1;\n" \
    "    setp.ge.u32 %p, %nth, 8;\n" \
    "    @%p bra " next ";\n" \
    "    sub.u64 %place, %at, %base;\n" \
    "    shr.u64 %place, %place, 2;\n" \
    "    add.u64 %place, %place, " n ";\n" \
    "    mad.wide.u32 %report, %nth, 32, %report;\n" \
    "    st.volatile.global.u64 [%report + 8], %number;\n" \
    "    st.volatile.global.u64 [%report + 16], %place;\n" \
    "    st.volatile.global.u32 [%report + 24], %generation;\n" \
    "    st.volatile.global.u32 [%report + 28], %w" n ";\n" \
    "    st.volatile.global.u32 [%report + 32], %f" n ";\n"

#define KERNEL_COMPARE(n) \
    "    setp.eq.u32 %p, %f" n ", %w" n ";\n" \
    "    @%p bra SAME" n ";\n" \
    KERNEL_REPORT(n, "SAME" n) \
    "SAME" n ":\n"

/* As the memory has them, past the cache of the multiprocessor. */
#define KERNEL_LOAD_FOUR(f, at) "    ld.global.cg.v4.u32 {" f "0, " f "1, " f "2, " f "3}, [" at "];\n"

#define KERNEL_SAME_FOUR(f) \
    "    setp.eq.u32 %p, " f "0, %w0;\n" \
    "    setp.eq.and.u32 %p, " f "1, %w1, %p;\n" \
    "    setp.eq.and.u32 %p, " f "2, %w2, %p;\n" \
    "    setp.eq.and.u32 %p, " f "3, %w3, %p;\n"

/*
 * Two loads on their way at a time. What differs is told as it was loaded, for loaded again it might be another thing;
 * but where the first four differ, which are told, the second are loaded again.
 */
#define KERNEL_CHECK_TWO_FOURS \
    "    add.u64 %next, %column, %step;\n" \
    "    setp.ge.u64 %p, %next, %fours;\n" \
    "    @%p bra ALONE;\n" \
    "    add.u64 %next, %at, %at_step;\n" \
    KERNEL_LOAD_FOUR("%f", "%at") \
    KERNEL_LOAD_FOUR("%g", "%next") \
    KERNEL_FOUR_WORDS \
    KERNEL_SAME_FOUR("%f") \
    "    @!%p bra UNLIKE;\n" \
    KERNEL_ADVANCE \
    "    mov.u32 %f0, %g0;\n" \
    "    mov.u32 %f1, %g1;\n" \
    "    mov.u32 %f2, %g2;\n" \
    "    mov.u32 %f3, %g3;\n" \
    KERNEL_FOUR_WORDS \
    KERNEL_SAME_FOUR("%f") \
    "    @%p bra NEXT;\n" \
    "    bra UNLIKE;\n" \
    "ALONE:\n"

#define KERNEL_CHECK_FOUR \
    KERNEL_LOAD_FOUR("%f", "%at") \
    KERNEL_SAME_FOUR("%f") \
    "    @%p bra NEXT;\n" \
    "UNLIKE:\n" \
    KERNEL_COMPARE("0") \
    KERNEL_COMPARE("1") \
    KERNEL_COMPARE("2") \
    KERNEL_COMPARE("3")

#define KERNEL_CHECK_ONE \
    "    ld.global.cg.u32 %f0, [%at];\n" \
    "    setp.eq.u32 %p, %f0, %w0;\n" \
    "    @%p bra NEXT_ONE;\n" \
    KERNEL_REPORT("0", "NEXT_ONE")

#define KERNEL_WAIT(name) \
    ".visible .entry " name "(.param .u64 ns)\n" \
    "{\n" \
    "    .reg .pred %p;\n" \
    "    .reg .b64 %until, %now;\n" \
    "    ld.param.u64 %until, [ns];\n" \
    "    mov.u64 %now, %globaltimer;\n" \
    "    add.u64 %until, %until, %now;\n" \
    "WAIT:\n" \
    "    mov.u64 %now, %globaltimer;\n" \
    "    setp.lt.u64 %p, %now, %until;\n" \
    "    @%p bra WAIT;\n" \
    "    ret;\n" \
    "}\n"

#define PTX_HEAD \
    ".version 6.3\n" \
    ".target sm_70\n" \
    ".address_size 64\n"

static const char ptx[] = PTX_HEAD
    KERNEL("vpmm_stress_fill", "", KERNEL_FILL_FOUR, KERNEL_FILL_ONE)
    KERNEL("vpmm_stress_check", KERNEL_CHECK_TWO_FOURS, KERNEL_CHECK_FOUR, KERNEL_CHECK_ONE)
    KERNEL_WAIT("vpmm_stress_wait");

/* clang-format on */

_Static_assert(sizeof(struct kernel_piece) == 64 && KERNEL_PIECES * 64 == 2048, "as the PTX has them");
_Static_assert(KERNEL_FIRST_FINDING == 8 && KERNEL_FINDING_BYTES == 32 && KERNEL_FINDINGS == 8, "as the PTX has them");
_Static_assert(KERNEL_STRIDE == 0x9E3779B1 && KERNEL_FACTOR == 0x85EBCA6B, "as the PTX has them");

typedef CUresult(CUDAAPI *load_function)(CUmodule *, const void *, unsigned, CUjit_option *, void **);
typedef CUresult(CUDAAPI *get_function)(CUfunction *, CUmodule, const char *);

/* libcuda is there: the gpu was opened by it. */
static bool find(const char *name, void *function)
{
    void *libcuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *symbol = libcuda ? dlsym(libcuda, name) : NULL;
    if (libcuda)
        dlclose(libcuda);
    memcpy(function, &symbol, sizeof symbol);
    if (!symbol)
        fprintf(stderr, "%s: libcuda.so.1 has no %s\n", program_name, name);
    return symbol != NULL;
}

static bool load(const gpu *g, struct kernels *k, load_function load_module, get_function get)
{
    char log[1024] = "";
    CUjit_option option[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *value[] = {log, (void *)(uintptr_t)sizeof log};
    if (!gpu_ok(g, "cuModuleLoadDataEx of the kernels", load_module(&k->module, ptx, 2, option, value))) {
        fprintf(stderr, "%s: the driver's compiler says: %s\n", program_name, log);
        return false;
    }
    return gpu_ok(g, "cuModuleGetFunction", get(&k->fill, k->module, "vpmm_stress_fill")) &&
           gpu_ok(g, "cuModuleGetFunction", get(&k->check, k->module, "vpmm_stress_check")) &&
           gpu_ok(g, "cuModuleGetFunction", get(&k->wait, k->module, "vpmm_stress_wait"));
}

bool kernels_open(const gpu *g, struct kernels *k)
{
    load_function load_module;
    get_function get;
    return find("cuLaunchKernel", &k->launch) && find("cuModuleUnload", &k->unload) &&
           find("cuModuleLoadDataEx", &load_module) && find("cuModuleGetFunction", &get) &&
           load(g, k, load_module, get);
}

void kernels_close(struct kernels *k)
{
    if (k->module)
        k->unload(k->module);
    *k = (struct kernels){0};
}

static uint64_t greater(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Fours of words, with the one that is not whole. */
static uint64_t fours_in_row(const struct kernel_piece *piece)
{
    return (piece->width + 3) / 4;
}

/* Its part of the launch's blocks, by the part that it is of all fours of words; no more than have a four each. */
static void give_blocks(struct kernel_piece *piece, uint64_t fours, unsigned threads)
{
    uint64_t own = piece->rows * fours_in_row(piece);
    uint64_t share = greater(MOST_BLOCKS * own / fours, 1);
    piece->columns = (uint32_t)greater(smaller((fours_in_row(piece) + threads - 1) / threads, share), 1);
    piece->blocks = piece->columns * (uint32_t)smaller(piece->rows, share / piece->columns);
}

CUresult kernels_launch(const struct kernels *k, bool check, const struct kernel_piece *piece, unsigned n,
                        uint64_t report, CUstream stream)
{
    struct kernel_piece pieces[KERNEL_PIECES];
    void *parameter[] = {&report, pieces};
    uint64_t fours = 0, widest = 0;
    unsigned blocks = 0;
    memset(pieces, 0, sizeof pieces);
    memcpy(pieces, piece, n * sizeof *piece);
    for (unsigned i = 0; i < n; i++) {
        fours += piece[i].rows * fours_in_row(&piece[i]);
        widest = greater(widest, fours_in_row(&piece[i]));
    }
    unsigned threads = widest < THREADS ? 32 : THREADS;
    for (unsigned i = 0; i < n; i++) {
        give_blocks(&pieces[i], fours, threads);
        blocks += pieces[i].blocks;
    }
    return k->launch(check ? k->check : k->fill, blocks, 1, 1, threads, 1, 1, 0, stream, parameter, NULL);
}

CUresult kernels_wait(const struct kernels *k, uint64_t ns, CUstream stream)
{
    void *parameter[] = {&ns};
    return k->launch(k->wait, 1, 1, 1, 1, 1, 1, 0, stream, parameter, NULL);
}
