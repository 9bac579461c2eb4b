package nsjail

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// share is how much a jail may take of resources that the kernel also counts for the owner of its
// user namespace. The owner is the worker's user, for all jails: root of the host, or of a
// container. The jails forked from one zygote share the zygote's instances and watches.
type share struct {
	instances, watches int    // of inotify
	queues             uint64 // bytes in POSIX message queues, RLIMIT_MSGQUEUE
}

// queueBytes is enough for one message queue of the default size: 10 messages of 8 KiB.
const queueBytes = 100 << 10

// findShare returns the share of each jail for that many concurrent programs. Half is left for
// processes outside of jails.
func findShare(programs int) (share, error) {
	var s share
	for name, to := range map[string]*int{"instances": &s.instances, "watches": &s.watches} {
		// The second one is the limit of the worker's user namespace, if it is in one.
		for _, file := range []string{"/proc/sys/fs/inotify/max_user_", "/proc/sys/user/max_inotify_"} {
			text, err := os.ReadFile(file + name)
			if err != nil {
				return s, err
			}
			most, err := strconv.Atoi(strings.TrimSpace(string(text)))
			if err != nil {
				return s, fmt.Errorf("read %s: %w", file+name, err)
			}
			if n := max(most/2/programs, 1); *to == 0 || n < *to {
				*to = n
			}
		}
	}
	var queues unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_MSGQUEUE, &queues)
	s.queues = min(queues.Max, queueBytes)
	return s, err
}
