package nsjail

import "github.com/bullpen-run/bullpen/worker/jail"

func timeAttacks() []attack {
	timeout := jail.Outcome{Kind: jail.TimedOut}
	return []attack{
		{
			name: "busy loop", language: "python", code: "print('first')\nwhile True: pass", timeout: 5 * soon, want: timeout,
			stdout: "first",
		},
		{name: "busy loop in node", language: "node", code: "for (;;);", timeout: soon, want: timeout},
		{name: "sleep", language: "bash", code: "sleep 600", timeout: soon, want: timeout},
		{name: "waiting for input", language: "bash", code: "cat; echo end", stdout: "end"},
		{name: "output for ever", language: "bash", code: "yes > /dev/null & yes >&2", timeout: soon, want: timeout},
		{
			name: "setting clocks", language: "python", code: tried("time.clock_settime, time.CLOCK_REALTIME, 0") + `
print(libc.settimeofday(bytes(16), None), ctypes.get_errno(), libc.adjtimex(bytes(512)), ctypes.get_errno())`,
			stdout: "EPERM\n-1 1 -1 1",
		},
		{name: "moving between processors", language: "python", code: `
import os
before = os.sched_getaffinity(0)
for n in range(1000): os.sched_setaffinity(0, {n % os.cpu_count()})
print(os.sched_getaffinity(0) == before)`, stdout: "True"},
		{
			name: "a clock of its own", language: "bash",
			code: "unshare -T true 2>/dev/null; echo $?; date -s @0 2>/dev/null | wc -l; [ $(date +%s) -gt 1000000000 " +
				"]; echo $?", stdout: "1\n1\n0",
		},
	}
}
