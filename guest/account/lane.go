package account

import (
	"runtime"
	"sync"
)

// Lane calls functions with the rights of users, on threads of its own. The threads exist from the start:
// when the sandbox has as many threads as it can have, a new one would end this program.
type Lane struct {
	calls chan call
	ended sync.WaitGroup
}

type call struct {
	user User
	f    func() error
	done chan<- error
}

// NewLane returns a lane that makes n calls at a time. Others wait.
func NewLane(n int) *Lane {
	l := &Lane{calls: make(chan call)}
	for range n {
		l.ended.Go(l.serve)
	}
	return l
}

// serve makes calls on a thread that no other goroutine uses, and that ends with the lane.
func (l *Lane) serve() {
	runtime.LockOSThread()
	for c := range l.calls {
		err := c.user.setRights()
		if err == nil {
			err = c.f()
		}
		c.done <- err
	}
}

// Close ends the lane, which must not be used any more.
func (l *Lane) Close() {
	close(l.calls)
	l.ended.Wait()
}

// Do calls f on a thread that has the user's rights to files and processes, and not the program's. What f
// starts on other threads does not have them. f must not panic, nor use this lane.
func (l *Lane) Do(user User, f func() error) error {
	if user.Current() {
		return f()
	}
	done := make(chan error, 1)
	l.calls <- call{user, f, done}
	return <-done
}
