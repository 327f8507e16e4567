#define _GNU_SOURCE 1

#include "stress_kernels.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 256, MOST_BLOCKS = 1056, MOST_ROWS = 512 };

/* clang-format off */

/* A word of a place, both of 32 bits: see KERNEL_STRIDE. */
#define KERNEL_WORD(word, place) \
    "    mad.lo.u32 " word ", " place ", 0x9E3779B1, %key;\n" \
    "    shr.u32 %mix, " word ", 15;\n" \
    "    xor.b32 " word ", " word ", %mix;\n" \
    "    mul.lo.u32 " word ", " word ", 0x85EBCA6B;\n" \
    "    shr.u32 %mix, " word ", 13;\n" \
    "    xor.b32 " word ", " word ", %mix;\n"

/*
 * Of both kernels: its piece, then the piece's rows and the words of each, four at a time, which a thread has in %w0 to
 * %w3. Where fewer are left it is one word after the other, in %w0.
 */
#define KERNEL_HEAD(name) \
    ".visible .entry " name "(.param .u64 report, .param .align 8 .b8 piece[1792])\n" \
    "{\n" \
    "    .reg .pred %p;\n" \
    "    .reg .b32 %r<8>;\n" \
    "    .reg .b64 %from, %base, %first, %rows, %pitch, %width, %number, %row, %column, %place, %at, %x, %x4, %y, " \
    "%report;\n" \
    "    .reg .b64 %left;\n" \
    "    .reg .b32 %key, %generation, %w<4>, %f<4>, %mix, %low, %n, %nth;\n" \
    "    mov.u64 %from, piece;\n" \
    "    mov.u32 %r0, %ctaid.z;\n" \
    "    mad.wide.u32 %from, %r0, 56, %from;\n" \
    "    ld.param.u64 %base, [%from];\n" \
    "    ld.param.u64 %first, [%from + 8];\n" \
    "    ld.param.u64 %rows, [%from + 16];\n" \
    "    ld.param.u64 %pitch, [%from + 24];\n" \
    "    ld.param.u64 %width, [%from + 32];\n" \
    "    ld.param.u64 %number, [%from + 40];\n" \
    "    ld.param.u32 %key, [%from + 48];\n" \
    "    ld.param.u32 %generation, [%from + 52];\n" \
    "    mov.u32 %r0, %ctaid.y;\n" \
    "    cvt.u64.u32 %row, %r0;\n" \
    "    mov.u32 %r1, %ntid.x;\n" \
    "    mov.u32 %r2, %nctaid.x;\n" \
    "    mul.lo.u32 %r3, %r1, %r2;\n" \
    "    mul.wide.u32 %x, %r3, 4;\n" \
    "    shl.b64 %x4, %x, 2;\n" \
    "    mov.u32 %r4, %nctaid.y;\n" \
    "    cvt.u64.u32 %y, %r4;\n" \
    "ROW:\n" \
    "    setp.ge.u64 %p, %row, %rows;\n" \
    "    @%p bra END;\n" \
    "    mov.u32 %r5, %ctaid.x;\n" \
    "    mov.u32 %r6, %tid.x;\n" \
    "    mad.lo.u32 %r7, %r5, %r1, %r6;\n" \
    "    mul.wide.u32 %column, %r7, 4;\n" \
    "    mad.lo.u64 %place, %row, %pitch, %column;\n" \
    "    add.u64 %place, %place, %first;\n" \
    "    shl.b64 %at, %place, 2;\n" \
    "    add.u64 %at, %at, %base;\n" \
    "FOUR:\n" \
    "    setp.ge.u64 %p, %column, %width;\n" \
    "    @%p bra NEXT_ROW;\n" \
    "    sub.u64 %left, %width, %column;\n" \
    "    min.u64 %left, %left, 4;\n" \
    "    cvt.u32.u64 %n, %left;\n" \
    "    cvt.u32.u64 %low, %place;\n" \
    "    setp.lt.u32 %p, %n, 4;\n" \
    "    @%p bra SINGLY;\n" KERNEL_WORD("%w0", "%low") "    add.u32 %low, %low, 1;\n" KERNEL_WORD( \
        "%w1", \
        "%low") "    add.u32 %low, %low, 1;\n" KERNEL_WORD("%w2", \
                                                           "%low") "    add.u32 %low, %low, 1;\n" KERNEL_WORD("%w3", \
                                                                                                              "%low")

/* %from: the address of the word, %place its place: both are set anew for the next four. */
#define KERNEL_SINGLY \
    "SINGLY:\n" \
    "    mov.u64 %from, %at;\n" \
    "    mov.u64 %left, %place;\n" \
    "ONE:\n" \
    "    cvt.u32.u64 %low, %left;\n" KERNEL_WORD("%w0", "%low")

#define KERNEL_TAIL \
    "NEXT_ONE:\n" \
    "    add.u64 %from, %from, 4;\n" \
    "    add.u64 %left, %left, 1;\n" \
    "    sub.u32 %n, %n, 1;\n" \
    "    setp.ne.u32 %p, %n, 0;\n" \
    "    @%p bra ONE;\n" \
    "NEXT:\n" \
    "    add.u64 %column, %column, %x;\n" \
    "    add.u64 %place, %place, %x;\n" \
    "    add.u64 %at, %at, %x4;\n" \
    "    bra FOUR;\n" \
    "NEXT_ROW:\n" \
    "    add.u64 %row, %row, %y;\n" \
    "    bra ROW;\n" \
    "END:\n" \
    "    ret;\n" \
    "}\n"

#define KERNEL_STORE \
    "    st.global.v4.u32 [%at], {%w0, %w1, %w2, %w3};\n" \
    "    bra NEXT;\n" KERNEL_SINGLY "    st.global.u32 [%from], %w0;\n"

/*
 * Counts a mismatch of %f and %w of this number at the place %left, and writes it down if it is one of the first.
 * Beyond a hundred thousand they are not counted: each is a way to the host and back.
 */
#define KERNEL_REPORT(n, next) \
    "    ld.param.u64 %report, [report];\n" \
    "    ld.volatile.global.u32 %nth, [%report];\n" \
    "    setp.ge.u32 %p, %nth, 100000;\n" \
    "    @%p bra " next ";\n" \
    "    atom.global.add.u32 %nth, [%report], 1;\n" \
    "    setp.ge.u32 %p, %nth, 8;\n" \
    "    @%p bra " next ";\n" \
    "    mad.wide.u32 %report, %nth, 32, %report;\n" \
    "    st.volatile.global.u64 [%report + 8], %number;\n" \
    "    st.volatile.global.u64 [%report + 16], %left;\n" \
    "    st.volatile.global.u32 [%report + 24], %generation;\n" \
    "    st.volatile.global.u32 [%report + 28], %w" n ";\n" \
    "    st.volatile.global.u32 [%report + 32], %f" n ";\n"

#define KERNEL_COMPARE(n) \
    "    setp.eq.u32 %p, %f" n ", %w" n ";\n" \
    "    @%p bra SAME" n ";\n" \
    KERNEL_REPORT(n, "SAME" n) \
    "SAME" n ":\n"

#define KERNEL_LOOK \
    "    ld.volatile.global.v4.u32 {%f0, %f1, %f2, %f3}, [%at];\n" \
    "    setp.eq.u32 %p, %f0, %w0;\n" \
    "    setp.eq.and.u32 %p, %f1, %w1, %p;\n" \
    "    setp.eq.and.u32 %p, %f2, %w2, %p;\n" \
    "    setp.eq.and.u32 %p, %f3, %w3, %p;\n" \
    "    @%p bra NEXT;\n" \
    "    mov.u64 %left, %place;\n" \
    KERNEL_COMPARE("0") \
    "    add.u64 %left, %left, 1;\n" \
    KERNEL_COMPARE("1") \
    "    add.u64 %left, %left, 1;\n" \
    KERNEL_COMPARE("2") \
    "    add.u64 %left, %left, 1;\n" \
    KERNEL_COMPARE("3") \
    "    bra NEXT;\n" \
    KERNEL_SINGLY \
    "    ld.volatile.global.u32 %f0, [%from];\n" \
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
    KERNEL_HEAD("vpmm_stress_fill") KERNEL_STORE KERNEL_TAIL
    KERNEL_HEAD("vpmm_stress_check") KERNEL_LOOK KERNEL_TAIL
    KERNEL_WAIT("vpmm_stress_wait");

/* clang-format on */

_Static_assert(sizeof(struct kernel_piece) == 56 && KERNEL_PIECES * 56 == 1792, "as the PTX has them");
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

CUresult kernels_launch(const struct kernels *k, bool check, const struct kernel_piece *piece, unsigned n,
                        uint64_t report, CUstream stream)
{
    struct kernel_piece pieces[KERNEL_PIECES];
    void *parameter[] = {&report, pieces};
    uint64_t rows = 1, width = 1;
    memset(pieces, 0, sizeof pieces);
    memcpy(pieces, piece, n * sizeof *piece);
    for (unsigned i = 0; i < n; i++) {
        rows = greater(rows, piece[i].rows);
        width = greater(width, piece[i].width);
    }
    rows = smaller(rows, MOST_ROWS);
    uint64_t fours = (width + 3) / 4;
    unsigned threads = fours < THREADS ? 32 : THREADS;
    uint64_t columns = smaller((fours + threads - 1) / threads, greater(MOST_BLOCKS / rows, 1));
    return k->launch(check ? k->check : k->fill, (unsigned)columns, (unsigned)rows, n, threads, 1, 1, 0, stream,
                     parameter, NULL);
}

CUresult kernels_wait(const struct kernels *k, uint64_t ns, CUstream stream)
{
    void *parameter[] = {&ns};
    return k->launch(k->wait, 1, 1, 1, 1, 1, 1, 0, stream, parameter, NULL);
}
