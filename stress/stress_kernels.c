#define _GNU_SOURCE 1

#include "stress_kernels.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 256, MOST_BLOCKS = 1056, MOST_ROWS = 512 };

/* Of both kernels: waits until it is late enough, then goes through the rows and the words of each. */
#define KERNEL_HEAD(name)                                                                                              \
    ".visible .entry " name "(.param .u64 base, .param .u64 first, .param .u64 rows, .param .u64 pitch,\n"             \
    "    .param .u64 width, .param .u64 late, .param .u64 number, .param .u64 report,\n"                               \
    "    .param .u32 key, .param .u32 generation)\n"                                                                   \
    "{\n"                                                                                                              \
    "    .reg .pred %p;\n"                                                                                             \
    "    .reg .b32 %r<16>;\n"                                                                                          \
    "    .reg .b64 %base, %first, %rows, %pitch, %width, %until, %now, %row, %column, %place, %at, %x, %x4, %y;\n"     \
    "    .reg .b32 %key, %word, %mix, %found, %nth;\n"                                                                 \
    "    ld.param.u64 %base, [base];\n"                                                                                \
    "    ld.param.u64 %first, [first];\n"                                                                              \
    "    ld.param.u64 %rows, [rows];\n"                                                                                \
    "    ld.param.u64 %pitch, [pitch];\n"                                                                              \
    "    ld.param.u64 %width, [width];\n"                                                                              \
    "    ld.param.u64 %until, [late];\n"                                                                               \
    "    ld.param.u32 %key, [key];\n"                                                                                  \
    "    setp.eq.u64 %p, %until, 0;\n"                                                                                 \
    "    @%p bra BEGIN;\n"                                                                                             \
    "    mov.u64 %now, %globaltimer;\n"                                                                                \
    "    add.u64 %until, %until, %now;\n"                                                                              \
    "WAIT:\n"                                                                                                          \
    "    mov.u64 %now, %globaltimer;\n"                                                                                \
    "    setp.lt.u64 %p, %now, %until;\n"                                                                              \
    "    @%p bra WAIT;\n"                                                                                              \
    "BEGIN:\n"                                                                                                         \
    "    mov.u32 %r0, %ctaid.y;\n"                                                                                     \
    "    cvt.u64.u32 %row, %r0;\n"                                                                                     \
    "    mov.u32 %r1, %ntid.x;\n"                                                                                      \
    "    mov.u32 %r2, %nctaid.x;\n"                                                                                    \
    "    mul.lo.u32 %r3, %r1, %r2;\n"                                                                                  \
    "    cvt.u64.u32 %x, %r3;\n"                                                                                       \
    "    shl.b64 %x4, %x, 2;\n"                                                                                        \
    "    mov.u32 %r4, %nctaid.y;\n"                                                                                    \
    "    cvt.u64.u32 %y, %r4;\n"                                                                                       \
    "ROW:\n"                                                                                                           \
    "    setp.ge.u64 %p, %row, %rows;\n"                                                                               \
    "    @%p bra END;\n"                                                                                               \
    "    mov.u32 %r5, %ctaid.x;\n"                                                                                     \
    "    mov.u32 %r6, %tid.x;\n"                                                                                       \
    "    mad.lo.u32 %r7, %r5, %r1, %r6;\n"                                                                             \
    "    cvt.u64.u32 %column, %r7;\n"                                                                                  \
    "    mad.lo.u64 %place, %row, %pitch, %column;\n"                                                                  \
    "    add.u64 %place, %place, %first;\n"                                                                            \
    "    shl.b64 %at, %place, 2;\n"                                                                                    \
    "    add.u64 %at, %at, %base;\n"                                                                                   \
    "WORD:\n"                                                                                                          \
    "    setp.ge.u64 %p, %column, %width;\n"                                                                           \
    "    @%p bra NEXT_ROW;\n"                                                                                          \
    "    cvt.u32.u64 %word, %place;\n"                                                                                 \
    "    mad.lo.u32 %word, %word, 0x9E3779B1, %key;\n"                                                                 \
    "    shr.u32 %mix, %word, 15;\n"                                                                                   \
    "    xor.b32 %word, %word, %mix;\n"                                                                                \
    "    mul.lo.u32 %word, %word, 0x85EBCA6B;\n"                                                                       \
    "    shr.u32 %mix, %word, 13;\n"                                                                                   \
    "    xor.b32 %word, %word, %mix;\n"

#define KERNEL_TAIL                                                                                                    \
    "NEXT:\n"                                                                                                          \
    "    add.u64 %column, %column, %x;\n"                                                                              \
    "    add.u64 %place, %place, %x;\n"                                                                                \
    "    add.u64 %at, %at, %x4;\n"                                                                                     \
    "    bra WORD;\n"                                                                                                  \
    "NEXT_ROW:\n"                                                                                                      \
    "    add.u64 %row, %row, %y;\n"                                                                                    \
    "    bra ROW;\n"                                                                                                   \
    "END:\n"                                                                                                           \
    "    ret;\n"                                                                                                       \
    "}\n"

static const char ptx[] =
    ".version 6.3\n"
    ".target sm_70\n"
    ".address_size 64\n" KERNEL_HEAD("vpmm_stress_fill") "    st.global.u32 [%at], %word;\n" KERNEL_TAIL KERNEL_HEAD(
        "vpmm_stress_check") "    ld.volatile.global.u32 %found, [%at];\n"
                             "    setp.eq.u32 %p, %found, %word;\n"
                             "    @%p bra NEXT;\n"
                             "    ld.param.u64 %now, [report];\n"
                             "    atom.global.add.u32 %nth, [%now], 1;\n"
                             "    setp.ge.u32 %p, %nth, 8;\n"
                             "    @%p bra NEXT;\n"
                             "    mad.wide.u32 %now, %nth, 32, %now;\n"
                             "    ld.param.u64 %until, [number];\n"
                             "    ld.param.u32 %r8, [generation];\n"
                             "    st.volatile.global.u64 [%now + 8], %until;\n"
                             "    st.volatile.global.u64 [%now + 16], %place;\n"
                             "    st.volatile.global.u32 [%now + 24], %r8;\n"
                             "    st.volatile.global.u32 [%now + 28], %word;\n"
                             "    st.volatile.global.u32 [%now + 32], %found;\n" KERNEL_TAIL;

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
           gpu_ok(g, "cuModuleGetFunction", get(&k->check, k->module, "vpmm_stress_check"));
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

CUresult kernels_launch(const struct kernels *k, bool check, const struct kernel_work *work, CUstream stream)
{
    struct kernel_work w = *work;
    void *parameter[] = {&w.base,    &w.first,  &w.rows,   &w.pitch, &w.width,
                         &w.late_ns, &w.number, &w.report, &w.key,   &w.generation};
    if (w.rows == 0)
        return k->launch(k->fill, 1, 1, 1, 32, 1, 1, 0, stream, parameter, NULL);
    uint64_t rows = w.rows < MOST_ROWS ? w.rows : MOST_ROWS, columns = (w.width + THREADS - 1) / THREADS;
    uint64_t most = MOST_BLOCKS / rows ? MOST_BLOCKS / rows : 1;
    unsigned threads = w.width < THREADS ? 32 : THREADS;
    return k->launch(check ? k->check : k->fill, (unsigned)(columns < most ? columns : most), (unsigned)rows, 1,
                     threads, 1, 1, 0, stream, parameter, NULL);
}
