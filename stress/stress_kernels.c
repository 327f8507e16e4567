#define _GNU_SOURCE 1

#include "stress_kernels.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/*
 * MOST_BLOCKS: in a launch, and one for each piece. Two on each multiprocessor of an H200 keep its memory busy, and
 * leave room for other launches: with more, a short one waits until a long one is over.
 */
enum { THREADS = 256, STRIP_FOURS = 4 /* of a thread */, MOST_BLOCKS = 264 };

/* clang-format off */

/* A word of its place times the stride, plus the key: see KERNEL_STRIDE. */
#define KERNEL_MIX(word) \
    "    shr.u32 %mix, " word ", 15;\n" \
    "    xor.b32 " word ", " word ", %mix;\n" \
    "    mul.lo.u32 " word ", " word ", 0x85EBCA6B;\n" \
    "    shr.u32 %mix, " word ", 13;\n" \
    "    xor.b32 " word ", " word ", %mix;\n"

/* Into %w0 to %w3: four words, the first of which is so many strides behind the word that `unmixed` is of. */
#define KERNEL_FOUR_WORDS(unmixed, strides) \
    "    add.u32 %w0, " unmixed ", " strides ";\n" \
    "    add.u32 %w1, %w0, 0x9E3779B1;\n" \
    "    add.u32 %w2, %w1, 0x9E3779B1;\n" \
    "    add.u32 %w3, %w2, 0x9E3779B1;\n" \
    KERNEL_MIX("%w0") KERNEL_MIX("%w1") KERNEL_MIX("%w2") KERNEL_MIX("%w3")

/* A thread's fours of a strip are 32 fours apart: 512 bytes, and these strides. */
#define KERNEL_STRIDES_1 "0x1BBCD880"
#define KERNEL_STRIDES_2 "0x3779B100"
#define KERNEL_STRIDES_3 "0x53368980"

/* %from moves on by so many bytes if the piece there begins at this block or before: `first_block` is where it says. */
#define KERNEL_FIND(bytes, first_block) \
    "    ld.param.u32 %n, [%from + " first_block "];\n" \
    "    setp.ge.u32 %p, %block, %n;\n" \
    "    @%p add.u64 %from, %from, " bytes ";\n"

/*
 * Of both kernels: the block's piece, found by halves, and its place among the piece's blocks; then the rows, and of
 * each row the strips. A strip is what a warp works on at a time: 128 fours of words, of which a thread has every 32nd.
 * Its first is at %at, mixed from %unmixed, and %p1 to %p3 say whether the row has the others too. `strip` is what is
 * done with them. `one` is done with a word of those that are left at a row's end, in %w0, at %at. With no more than 40
 * registers a thread six blocks have room on a multiprocessor.
 */
#define KERNEL(name, strip, one) \
    ".visible .entry " name "(.param .u64 report, .param .align 8 .b8 piece[2048])\n" \
    ".maxntid 256, 1, 1\n" \
    ".maxnreg 40\n" \
    "{\n" \
    "    .reg .pred %p, %p1, %p2, %p3;\n" \
    "    .reg .b64 %from, %base, %first, %rows, %pitch, %width, %number, %row, %row_step, %place, %at, %at_step;\n" \
    "    .reg .b64 %fours, %begin, %column, %step, %left, %strip, %report;\n" \
    "    .reg .b32 %key, %generation, %block, %columns, %thread, %threads, %unmixed, %unmixed_step;\n" \
    "    .reg .b32 %n, %nth, %mix, %unlike, %w<4>, %f<4>, %g<4>, %h<4>, %i<4>;\n" \
    "    mov.u64 %from, piece;\n" \
    "    mov.u32 %block, %ctaid.x;\n" \
    KERNEL_FIND("1024", "1080") \
    KERNEL_FIND("512", "568") \
    KERNEL_FIND("256", "312") \
    KERNEL_FIND("128", "184") \
    KERNEL_FIND("64", "120") \
    "    ld.param.u64 %base, [%from];\n" \
    "    ld.param.u64 %first, [%from + 8];\n" \
    "    ld.param.u64 %rows, [%from + 16];\n" \
    "    ld.param.u64 %pitch, [%from + 24];\n" \
    "    ld.param.u64 %width, [%from + 32];\n" \
    "    ld.param.u64 %number, [%from + 40];\n" \
    "    ld.param.u32 %key, [%from + 48];\n" \
    "    ld.param.u32 %generation, [%from + 52];\n" \
    "    ld.param.u32 %n, [%from + 56];\n" \
    "    sub.u32 %block, %block, %n;\n" \
    "    ld.param.u16 %columns, [%from + 60];\n" \
    "    ld.param.u16 %n, [%from + 62];\n" \
    "    cvt.u64.u32 %row_step, %n;\n" \
    "    div.u32 %n, %block, %columns;\n" \
    "    cvt.u64.u32 %row, %n;\n" \
    "    mul.lo.u32 %n, %n, %columns;\n" \
    "    sub.u32 %block, %block, %n;\n" \
    "    mov.u32 %thread, %tid.x;\n" \
    "    mov.u32 %threads, %ntid.x;\n" \
    "    mad.lo.u32 %thread, %block, %threads, %thread;\n" \
    "    and.b32 %n, %thread, 31;\n" \
    "    sub.u32 %block, %thread, %n;\n" \
    "    mad.lo.u32 %n, %block, 4, %n;\n" \
    "    cvt.u64.u32 %begin, %n;\n" \
    "    mul.lo.u32 %n, %threads, %columns;\n" \
    "    shl.b32 %n, %n, 2;\n" \
    "    cvt.u64.u32 %step, %n;\n" \
    "    shl.b64 %at_step, %step, 4;\n" \
    "    shl.b32 %n, %n, 2;\n" \
    "    mul.lo.u32 %unmixed_step, %n, 0x9E3779B1;\n" \
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
    "STRIP:\n" \
    "    setp.ge.u64 %p, %column, %fours;\n" \
    "    @%p bra LAST;\n" \
    "    sub.u64 %left, %fours, %column;\n" \
    "    min.u64 %left, %left, 128;\n" \
    "    cvt.u32.u64 %n, %left;\n" \
    "    setp.gt.u32 %p1, %n, 32;\n" \
    "    setp.gt.u32 %p2, %n, 64;\n" \
    "    setp.gt.u32 %p3, %n, 96;\n" \
    strip \
    "NEXT:\n" \
    "    add.u64 %column, %column, %step;\n" \
    "    add.u32 %unmixed, %unmixed, %unmixed_step;\n" \
    "    add.u64 %at, %at, %at_step;\n" \
    "    bra STRIP;\n" \
    "LAST:\n" \
    "    cvt.u32.u64 %n, %width;\n" \
    "    and.b32 %n, %n, 3;\n" \
    "    setp.ge.u32 %p, %thread, %n;\n" \
    "    @%p bra NEXT_ROW;\n" \
    "    shl.b64 %place, %fours, 2;\n" \
    "    add.u64 %place, %place, %first;\n" \
    "    mad.lo.u64 %place, %row, %pitch, %place;\n" \
    "    cvt.u64.u32 %at, %thread;\n" \
    "    add.u64 %place, %place, %at;\n" \
    "    shl.b64 %at, %place, 2;\n" \
    "    add.u64 %at, %at, %base;\n" \
    "    cvt.u32.u64 %n, %place;\n" \
    "    mad.lo.u32 %w0, %n, 0x9E3779B1, %key;\n" \
    KERNEL_MIX("%w0") \
    one \
    "NEXT_ROW:\n" \
    "    add.u64 %row, %row, %row_step;\n" \
    "    bra ROW;\n" \
    "END:\n" \
    "    ret;\n" \
    "}\n"

/* Each word is touched once, so the caches may let go of it first: .cs. */
#define KERNEL_STORE_FOUR(when, at) "    " when "st.global.cs.v4.u32 [" at "], {%w0, %w1, %w2, %w3};\n"
#define KERNEL_LOAD_FOUR(when, f, at) \
    "    " when "ld.global.cs.v4.u32 {" f "0, " f "1, " f "2, " f "3}, [" at "];\n"

#define KERNEL_FILL_STRIP \
    KERNEL_FOUR_WORDS("%unmixed", "0") KERNEL_STORE_FOUR("", "%at") \
    KERNEL_FOUR_WORDS("%unmixed", KERNEL_STRIDES_1) KERNEL_STORE_FOUR("@%p1 ", "%at + 512") \
    KERNEL_FOUR_WORDS("%unmixed", KERNEL_STRIDES_2) KERNEL_STORE_FOUR("@%p2 ", "%at + 1024") \
    KERNEL_FOUR_WORDS("%unmixed", KERNEL_STRIDES_3) KERNEL_STORE_FOUR("@%p3 ", "%at + 1536")

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

/* Gathers in %unlike the bits in which these four differ from %w0 to %w3. */
#define KERNEL_UNLIKE_ONE(when, f, w) \
    "    xor.b32 %mix, " f ", " w ";\n" \
    "    " when "or.b32 %unlike, %unlike, %mix;\n"
#define KERNEL_UNLIKE_FOUR(when, f) \
    KERNEL_UNLIKE_ONE(when, f "0", "%w0") \
    KERNEL_UNLIKE_ONE(when, f "1", "%w1") \
    KERNEL_UNLIKE_ONE(when, f "2", "%w2") \
    KERNEL_UNLIKE_ONE(when, f "3", "%w3")

#define KERNEL_MOVE_FOUR(to, from) \
    "    mov.u32 " to "0, " from "0;\n" \
    "    mov.u32 " to "1, " from "1;\n" \
    "    mov.u32 " to "2, " from "2;\n" \
    "    mov.u32 " to "3, " from "3;\n"

/*
 * Four loads on their way at a time. If any bit differs, what was loaded is gone through, a four after the other, each
 * in its turn in %f: loaded again it might be another thing.
 */
#define KERNEL_CHECK_STRIP \
    KERNEL_LOAD_FOUR("", "%f", "%at") \
    KERNEL_LOAD_FOUR("@%p1 ", "%g", "%at + 512") \
    KERNEL_LOAD_FOUR("@%p2 ", "%h", "%at + 1024") \
    KERNEL_LOAD_FOUR("@%p3 ", "%i", "%at + 1536") \
    "    mov.u32 %unlike, 0;\n" \
    KERNEL_FOUR_WORDS("%unmixed", "0") KERNEL_UNLIKE_FOUR("", "%f") \
    KERNEL_FOUR_WORDS("%unmixed", KERNEL_STRIDES_1) KERNEL_UNLIKE_FOUR("@%p1 ", "%g") \
    KERNEL_FOUR_WORDS("%unmixed", KERNEL_STRIDES_2) KERNEL_UNLIKE_FOUR("@%p2 ", "%h") \
    KERNEL_FOUR_WORDS("%unmixed", KERNEL_STRIDES_3) KERNEL_UNLIKE_FOUR("@%p3 ", "%i") \
    "    setp.eq.u32 %p, %unlike, 0;\n" \
    "    @%p bra NEXT;\n" \
    "    mov.u64 %strip, %at;\n" \
    "    sub.u64 %left, %fours, %column;\n" \
    "    min.u64 %left, %left, 128;\n" \
    "    mov.u32 %n, %unmixed;\n" \
    "TELL:\n" \
    KERNEL_FOUR_WORDS("%n", "0") \
    KERNEL_COMPARE("0") \
    KERNEL_COMPARE("1") \
    KERNEL_COMPARE("2") \
    KERNEL_COMPARE("3") \
    KERNEL_MOVE_FOUR("%f", "%g") KERNEL_MOVE_FOUR("%g", "%h") KERNEL_MOVE_FOUR("%h", "%i") \
    "    add.u64 %at, %at, 512;\n" \
    "    add.u32 %n, %n, " KERNEL_STRIDES_1 ";\n" \
    "    sub.u64 %left, %left, 32;\n" \
    "    setp.gt.s64 %p, %left, 0;\n" \
    "    @%p bra TELL;\n" \
    "    mov.u64 %at, %strip;\n"

#define KERNEL_CHECK_ONE \
    "    ld.global.cs.u32 %f0, [%at];\n" \
    "    setp.eq.u32 %p, %f0, %w0;\n" \
    "    @%p bra NEXT_ROW;\n" \
    KERNEL_REPORT("0", "NEXT_ROW")

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
    KERNEL("vpmm_stress_fill", KERNEL_FILL_STRIP, KERNEL_FILL_ONE)
    KERNEL("vpmm_stress_check", KERNEL_CHECK_STRIP, KERNEL_CHECK_ONE)
    KERNEL_WAIT("vpmm_stress_wait");

/* clang-format on */

_Static_assert(sizeof(struct kernel_piece) == 64 && KERNEL_PIECES * 64 == 2048, "as the PTX has them");
_Static_assert(offsetof(struct kernel_piece, first_block) == 56, "as the PTX has it");
_Static_assert(THREADS == 256 && STRIP_FOURS == 4 && MOST_BLOCKS + KERNEL_PIECES <= UINT16_MAX, "as the PTX has them");
_Static_assert(KERNEL_FIRST_FINDING == 8 && KERNEL_FINDING_BYTES == 32 && KERNEL_FINDINGS == 8, "as the PTX has them");
_Static_assert(KERNEL_STRIDE == 0x9E3779B1 && KERNEL_FACTOR == 0x85EBCA6B, "as the PTX has them");
_Static_assert(KERNEL_STRIDE * 128 == 0x1BBCD880 && KERNEL_STRIDE * 256 == 0x3779B100 &&
                   KERNEL_STRIDE * 384 == 0x53368980,
               "as the PTX has them");

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

/* Its part of the launch's blocks, by the part that it is of all fours of words; no more than have a strip each. */
static unsigned give_blocks(struct kernel_piece *piece, uint64_t fours, unsigned threads, unsigned first_block)
{
    uint64_t own = piece->rows * fours_in_row(piece), in_block = (uint64_t)threads * STRIP_FOURS;
    uint64_t share = greater(MOST_BLOCKS * own / fours, 1);
    piece->columns = (uint16_t)greater(smaller((fours_in_row(piece) + in_block - 1) / in_block, share), 1);
    piece->rows_at_once = (uint16_t)smaller(piece->rows, share / piece->columns);
    piece->first_block = first_block;
    return (unsigned)piece->columns * piece->rows_at_once;
}

CUresult kernels_launch(const struct kernels *k, bool check, const struct kernel_piece *piece, unsigned n,
                        uint64_t report, CUstream stream)
{
    struct kernel_piece pieces[KERNEL_PIECES];
    void *parameter[] = {&report, pieces};
    uint64_t fours = 0, widest = 0;
    unsigned blocks = 0;
    memset(pieces, 0xFF, sizeof pieces); /* one that is none begins behind all blocks */
    memcpy(pieces, piece, n * sizeof *piece);
    for (unsigned i = 0; i < n; i++) {
        fours += piece[i].rows * fours_in_row(&piece[i]);
        widest = greater(widest, fours_in_row(&piece[i]));
    }
    unsigned threads = widest < THREADS ? 32 : THREADS;
    for (unsigned i = 0; i < n; i++)
        blocks += give_blocks(&pieces[i], fours, threads, blocks);
    return k->launch(check ? k->check : k->fill, blocks, 1, 1, threads, 1, 1, 0, stream, parameter, NULL);
}

CUresult kernels_wait(const struct kernels *k, uint64_t ns, CUstream stream)
{
    void *parameter[] = {&ns};
    return k->launch(k->wait, 1, 1, 1, 1, 1, 1, 0, stream, parameter, NULL);
}
