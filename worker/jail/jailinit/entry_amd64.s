#include "go_asm.h"
#include "textflag.h"

// entry is where the kernel starts the init (-ldflags='-E main.entry'), and not where
// Go's runtime has programs begin, which it makes no use of: the runtime's start costs
// 1.5 ms of processor time and 195 page faults for each jail, this 0.1 ms and 8.
//
// So all that runs from here on does without the runtime. It is one thread on the
// kernel's own stack, which grows by itself up to RLIMIT_STACK. There is no heap and
// no goroutine, no package has been initialised but for what is laid out in the
// binary, and nothing looks at features of the processor. TestNothingNeedsTheRuntime
// holds it: it knows what may be called. The code that Go generates finds
// the current goroutine in FS, here an empty one. Its stack has no bound, so no function
// asks the runtime for more of it; and it has no thread, so that the runtime, where it
// is called to panic, does so by a memory fault. The kernel kills even PID 1 for
// that, and the jail with it: the worker sees an init that died without a report.
TEXT ·entry(SB), NOSPLIT|NOFRAME|TOPFRAME, $0
	MOVQ SP, BX
	LEAQ ·nobody(SB), AX
	LEAQ ·nobody+const_nobodySize(SB), SI
	MOVQ AX, -8(SI)
	MOVQ $0x1002, DI // ARCH_SET_FS
	MOVQ $158, AX    // arch_prctl
	SYSCALL
	ANDQ $~15, SP
	SUBQ $16, SP
	MOVQ BX, 0(SP)
	CALL ·start(SB)
	INT  $3
