package gateway

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// workerStub has one worker.
type workerStub struct{ worker proto.Worker }

func (s *workerStub) Workers(context.Context) ([]proto.Worker, error) {
	return []proto.Worker{s.worker}, nil
}

func (s *workerStub) Pools(context.Context) ([]proto.Pool, error) {
	return []proto.Pool{
		{Name: "default"},
		{
			Name: "gpu", Capabilities: []string{"disk"}, Architecture: "amd64", WorkerSlots: 8, Workers: 1, Slots: 8, Queued: 40,
			Running: 8, MeanSeconds: 2.5, OldestWait: 0.5,
			Desired: &proto.DesiredWorkers{Workers: 2, Slots: 16, Reason: "demand"},
		},
	}, nil
}

func (s *workerStub) Drain(_ context.Context, name string, drain bool) (proto.Worker, error) {
	if name != s.worker.Name {
		return proto.Worker{}, fmt.Errorf("worker %s: %w", name, proto.ErrNotFound)
	}
	s.worker.Draining = drain
	return s.worker, nil
}

func TestWorkers(t *testing.T) {
	h := newHarness(t)
	h.server.Workers = &workerStub{proto.Worker{
		Name: "node-1", Pool: "gpu", Version: "v1", StartedAt: time.Unix(1e9, 0), Slots: 8, Running: 3,
		Capabilities: []string{"disk", "language:python"}, Architecture: "arm64",
		Languages: map[proto.Language]string{proto.Python: "3.11"}, Images: 2, Threads: 40,
		Machine: proto.Machine{CPUs: 4, CPUsBusy: 1.5, Memory: 10, MemoryAvailable: 5},
	}}
	h.remount()
	want := map[string]any{
		"name": "node-1", "pool": "gpu", "version": "v1", "started_at": "2001-09-09T01:46:40.000Z", "slots": 8.0,
		"running": 3.0, "sandboxes": 0.0, "running_sandboxes": 0.0, "sandbox_memory": 0.0,
		"sandbox_memory_free": 0.0, "draining": false,
		"capabilities": []any{"disk", "language:python"}, "architecture": "arm64",
		"languages": map[string]any{"python": "3.11"}, "cached_images": 2.0, "cached_threads": 40.0,
		"machine": map[string]any{"cpus": 4.0, "cpus_busy": 1.5, "memory": 10.0, "memory_available": 5.0},
	}
	if list := h.do("GET", "/v1/admin/workers", "").want(200, "").json(); !reflect.DeepEqual(
		list, map[string]any{"workers": []any{want}}) {
		t.Errorf("got %v", list)
	}
	want["draining"] = true
	if got := h.do("POST", "/v1/admin/workers/node-1/drain", "").want(200, "").json(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	want["draining"] = false
	if got := h.do("POST", "/v1/admin/workers/node-1/undrain", "").want(200, "").json(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	h.do("POST", "/v1/admin/workers/node-2/drain", "").want(404, "not_found")
	execute := h.stub.addKey("acme", "pro", asUser)
	h.do("GET", "/v1/admin/workers", "", "Authorization", "Bearer "+execute).want(403, "forbidden")
	h.do("POST", "/v1/admin/workers/node-1/drain", "", "Authorization", "Bearer "+execute).want(403, "forbidden")
}

type processes func() ([]proto.Process, error)

func (f processes) Processes(context.Context) ([]proto.Process, error) { return f() }

func TestProcesses(t *testing.T) {
	h := newHarness(t)
	h.server.Processes = processes(func() ([]proto.Process, error) {
		return []proto.Process{
			{
				Name: "web", Roles: []string{"gateway"}, Version: "v1", StartedAt: time.Unix(1e9, 0),
				Problems: []proto.Problem{{Need: "store", Message: "no"}},
			},
			{
				Name: "run", Roles: []string{"worker"}, Missing: map[string]string{"disk": "no loop devices"},
				Disk: &proto.DiskSpace{Free: 5, Reserve: 2},
			},
		}, nil
	})
	h.remount()
	want := []any{
		map[string]any{
			"name": "web", "roles": []any{"gateway"}, "version": "v1", "started_at": "2001-09-09T01:46:40.000Z",
			"problems": []any{map[string]any{"need": "store", "message": "no"}}, "missing": map[string]any{}, "disk": nil,
		},
		map[string]any{
			"name": "run", "roles": []any{"worker"}, "version": "", "started_at": "0001-01-01T00:00:00.000Z",
			"problems": []any{},
			"missing":  map[string]any{"disk": "no loop devices"},
			"disk":     map[string]any{"free": 5., "reserve": 2.},
		},
	}
	if got := h.do("GET", "/v1/admin/processes", "").want(200, "").json()["processes"]; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestAutoscale(t *testing.T) {
	h := newHarness(t)
	h.server.Workers = &workerStub{}
	h.remount()
	want := map[string]any{"pools": []any{
		map[string]any{
			"name": "default", "capabilities": []any{}, "architecture": nil, "worker_slots": 0.0, "workers": 0.0, "slots": 0.0,
			"queued": 0.0, "running": 0.0,
			"mean_seconds": 0.0, "oldest_wait_seconds": 0.0, "desired": nil,
		},
		map[string]any{
			"name": "gpu", "capabilities": []any{"disk"}, "architecture": "amd64", "worker_slots": 8.0, "workers": 1.0,
			"slots": 8.0, "queued": 40.0, "running": 8.0,
			"mean_seconds": 2.5, "oldest_wait_seconds": 0.5,
			"desired": map[string]any{"workers": 2.0, "slots": 16.0, "reason": "demand"},
		},
	}}
	if got := h.do("GET", "/v1/admin/autoscale", "").want(200, "").json(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	execute := h.stub.addKey("acme", "pro", asUser)
	h.do("GET", "/v1/admin/autoscale", "", "Authorization", "Bearer "+execute).want(403, "forbidden")
}
