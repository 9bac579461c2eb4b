package agentlogs

import (
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A follower that is slow holds little in memory, however large the messages are.
func TestSlowFollowersHoldLittle(t *testing.T) {
	ctx := storetest.Context(t)
	logs := &Logs{Store: storetest.Open(t, storetest.Server(t))}
	f, err := logs.Follow("acme", "log")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.current = true
	large := make([]byte, 256<<10)
	var at, after uint64
	for range liveMessages {
		if at, err = logs.Append(ctx, "acme", "log", at, large); err != nil {
			t.Fatal(err)
		}
	}
	held := 0
	for range liveMessages {
		m := <-f.live
		held += len(m.Data)
		f.live <- m
	}
	if held > liveMessages*maxLive {
		t.Errorf("%d bytes", held)
	}
	for range liveMessages {
		var message []byte
		if message, after, err = f.Next(ctx, after); err != nil || len(message) != len(large) {
			t.Fatalf("%d bytes: %v", len(message), err)
		}
	}
}

// A follower that was slow reads what was dropped for it, although no further message comes.
func TestSlowFollowersCatchUp(t *testing.T) {
	ctx := storetest.Context(t)
	logs := &Logs{Store: storetest.Open(t, storetest.Server(t))}
	f, err := logs.Follow("acme", "log")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.poll = time.Hour
	var at, after uint64
	add := func(i int) {
		if at, err = logs.Append(ctx, "acme", "log", at, []byte(strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	read := func(i int) {
		var message []byte
		if message, after, err = f.Next(ctx, after); err != nil || string(message) != strconv.Itoa(i) {
			t.Fatalf("message %d is %q: %v", i, message, err)
		}
	}
	// It is current, and reads what the server sends.
	add(0)
	read(0)
	f.current = true
	const messages = 3 * liveMessages
	for i := range messages {
		add(i + 1)
	}
	for i := range messages {
		read(i + 1)
	}
}
