package registry_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// What one process stores about the modules of a sandbox is seen by others, for that sandbox alone,
// until the modules can be preloaded.
func TestPreloadFailures(t *testing.T) {
	s, ctx := storetest.Server(t), storetest.Context(t)
	gateway := &registry.PreloadFailures{Store: storetest.Open(t, s)}
	// A worker starts without the bucket, which a gateway of an older version has not created.
	bucket, err := gateway.Store.JS.Stream(ctx, "KV_bullpen_preload")
	if err != nil {
		t.Fatal(err)
	}
	config := bucket.CachedInfo().Config
	if err := gateway.Store.JS.DeleteStream(ctx, config.Name); err != nil {
		t.Fatal(err)
	}
	st, err := store.Connect(ctx, store.Access{InProcess: s, Name: "worker"}, store.Config{AttachOnly: true},
		storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	worker := &registry.PreloadFailures{Store: st}
	if err := worker.Set(ctx, proto.Sandbox{}, "w1", errors.New("no numpy")); err == nil {
		t.Error("stored without a bucket")
	}
	if _, err := gateway.Store.JS.CreateStream(ctx, config); err != nil {
		t.Fatal(err)
	}
	p := profile("web")
	sandbox, other := p.Sandbox("sha256:1"), p.Sandbox("sha256:2")
	want := func(s proto.Sandbox, text string) {
		t.Helper()
		f, err := gateway.PreloadFailure(ctx, s)
		if err != nil || (f != nil) != (text != "") ||
			f != nil && (f.Error != text || f.Worker != "w1" || time.Since(f.At) > time.Hour) {
			t.Errorf("got %+v, %v, want %q", f, err, text)
		}
	}
	want(sandbox, "")
	if err := worker.Set(ctx, sandbox, "w1", nil); err != nil {
		t.Error(err)
	}
	if err := worker.Set(ctx, sandbox, "w1", errors.New("no \xff"+strings.Repeat("é", 4000))); err != nil {
		t.Error(err)
	}
	sandbox.OutputBytes++ // does not concern the modules
	want(sandbox, "no \uFFFD"+strings.Repeat("é", 2045))
	want(other, "")
	if err := worker.Set(ctx, sandbox, "w2", nil); err != nil { // what w1 lacks is still missing
		t.Error(err)
	}
	want(sandbox, "no \uFFFD"+strings.Repeat("é", 2045))
	if err := worker.Set(ctx, sandbox, "w1", nil); err != nil {
		t.Error(err)
	}
	want(sandbox, "")
}
