/*
 * dlsym.c - the dlsym that the program finds.
 *
 * RTLD_NEXT and RTLD_DEFAULT mean what the calling library says, which dlsym knows by its return address alone. So what
 * is not ours to answer is no call of ours: the real dlsym is jumped to, with the registers and the return address of
 * the caller, as if it had been called. A compiler may do that with a call in last place, but promises nothing: hence
 * the assembly. preload_answer (lookup.c) makes sure that preload_dlsym is set.
 */
#if defined(__x86_64__)

__asm__(".text\n"
        ".p2align 4\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        ".cfi_startproc\n"
        "endbr64\n"
        "push %rdi\n"
        ".cfi_adjust_cfa_offset 8\n"
        "push %rsi\n"
        ".cfi_adjust_cfa_offset 8\n"
        "sub $8, %rsp\n" /* calls are made with 16 bytes aligned */
        ".cfi_adjust_cfa_offset 8\n"
        "call preload_answer\n"
        "add $8, %rsp\n"
        ".cfi_adjust_cfa_offset -8\n"
        "pop %rsi\n"
        ".cfi_adjust_cfa_offset -8\n"
        "pop %rdi\n"
        ".cfi_adjust_cfa_offset -8\n"
        "test %rax, %rax\n"
        "jnz 1f\n"
        "jmp *preload_dlsym(%rip)\n"
        "1:\n"
        "ret\n"
        ".cfi_endproc\n"
        ".size dlsym, .-dlsym\n");

#elif defined(__aarch64__)

__asm__(".text\n"
        ".p2align 4\n"
        ".globl dlsym\n"
        ".type dlsym, %function\n"
        "dlsym:\n"
        ".cfi_startproc\n"
        "hint #34\n" /* bti c */
        "stp x29, x30, [sp, #-32]!\n"
        ".cfi_adjust_cfa_offset 32\n"
        ".cfi_rel_offset x29, 0\n"
        ".cfi_rel_offset x30, 8\n"
        "mov x29, sp\n"
        "stp x0, x1, [sp, #16]\n"
        "bl preload_answer\n"
        "mov x16, x0\n"
        "ldp x0, x1, [sp, #16]\n"
        "ldp x29, x30, [sp], #32\n"
        ".cfi_restore x30\n"
        ".cfi_restore x29\n"
        ".cfi_adjust_cfa_offset -32\n"
        "cbnz x16, 1f\n"
        "adrp x16, preload_dlsym\n"
        "ldr x16, [x16, :lo12:preload_dlsym]\n"
        "br x16\n"
        "1:\n"
        "mov x0, x16\n"
        "ret\n"
        ".cfi_endproc\n"
        ".size dlsym, .-dlsym\n");

#else
#error "dlsym.c: a jump to the real dlsym is written for x86-64 and aarch64"
#endif
