#include "textflag.h"

// entry is as on amd64. The current goroutine is in a dedicated register.
TEXT ·entry(SB), NOSPLIT|NOFRAME|TOPFRAME, $0
	MOVD RSP, R0
	MOVD $·nobody(SB), g
	SUB  $16, RSP
	MOVD R0, 8(RSP)
	CALL ·start(SB)
	BRK
