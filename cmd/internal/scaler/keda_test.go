package scaler

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/goccy/go-yaml"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/bullpen-run/bullpen/cmd/internal/scaler/externalscaler"
	"github.com/bullpen-run/bullpen/proto"
)

// dispatcher answers with what is stored, or fails if that is nil.
type dispatcher struct{ pools atomic.Pointer[[]proto.Pool] }

func (d *dispatcher) set(pools ...proto.Pool) { d.pools.Store(&pools) }

func (d *dispatcher) Pools(context.Context) ([]proto.Pool, error) {
	if list := d.pools.Load(); list != nil {
		return *list, nil
	}
	return nil, errors.New("no dispatcher leads")
}

// serveKeda returns a client of a scaler, as KEDA has one.
func serveKeda(t *testing.T, d *dispatcher) externalscaler.ExternalScalerClient {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	k := &Keda{Pools: d.Pools, Log: slog.New(slog.DiscardHandler)}
	go func() { done <- k.Serve(ctx, listener) }()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel() // while the client is connected
		if err := <-done; err != nil {
			t.Error(err)
		}
		_ = conn.Close()
	})
	return externalscaler.NewExternalScalerClient(conn)
}

func trigger(pairs ...string) *externalscaler.ScaledObjectRef {
	ref := &externalscaler.ScaledObjectRef{
		Name: "worker", Namespace: "bullpen", ScalerMetadata: map[string]string{"scalerAddress": "bullpen:9077"},
	}
	for i := 0; i < len(pairs); i += 2 {
		ref.ScalerMetadata[pairs[i]] = pairs[i+1]
	}
	return ref
}

func TestKeda(t *testing.T) {
	d := &dispatcher{}
	client := serveKeda(t, d)
	d.set(pool("default", 0), pool("gpu", 3), proto.Pool{Name: "new"})

	spec, err := client.GetMetricSpec(t.Context(), trigger())
	if err != nil || len(spec.MetricSpecs) != 1 || spec.MetricSpecs[0].MetricName != kedaMetric ||
		spec.MetricSpecs[0].TargetSize != 1 || spec.MetricSpecs[0].TargetSizeFloat != 1 {
		t.Errorf("got specification %v, %v", spec, err)
	}
	for name, want := range map[string]int64{"": 0, "default": 0, "gpu": 3} {
		values, err := client.GetMetrics(
			t.Context(), &externalscaler.GetMetricsRequest{ScaledObjectRef: trigger("pool", name), MetricName: kedaMetric})
		if err != nil || len(values.MetricValues) != 1 || values.MetricValues[0].MetricValue != want ||
			values.MetricValues[0].MetricValueFloat != float64(want) {
			t.Errorf("pool %q: got %v, %v", name, values, err)
		}
		active, err := client.IsActive(t.Context(), trigger("pool", name))
		if err != nil || active.Result != (want > 0) {
			t.Errorf("pool %q: got active %v, %v", name, active, err)
		}
	}

	isActive := func(ref *externalscaler.ScaledObjectRef) error {
		_, err := client.IsActive(t.Context(), ref)
		return err
	}
	stream := func(ref *externalscaler.ScaledObjectRef) error {
		s, err := client.StreamIsActive(t.Context(), ref)
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	metric := func(name string, ref *externalscaler.ScaledObjectRef) error {
		_, err := client.GetMetrics(t.Context(), &externalscaler.GetMetricsRequest{ScaledObjectRef: ref, MetricName: name})
		return err
	}
	_, badSpec := client.GetMetricSpec(t.Context(), trigger("Pool", "gpu"))
	check := func(got error, code codes.Code, message string) {
		t.Helper()
		if status.Code(got) != code || !strings.Contains(got.Error(), message) {
			t.Errorf("got %v, want %s with %q", got, code, message)
		}
	}
	check(badSpec, codes.InvalidArgument, `"Pool"`)
	check(isActive(trigger("Pool", "gpu")), codes.InvalidArgument, `"Pool"`)
	check(isActive(trigger("pool", "cpu")), codes.InvalidArgument, `"cpu"`)
	check(stream(trigger("pool", "cpu")), codes.InvalidArgument, `"cpu"`)
	check(metric(kedaMetric, trigger("pool", "cpu")), codes.InvalidArgument, `"cpu"`)
	check(metric("queued", trigger()), codes.InvalidArgument, `"queued"`)
	check(isActive(trigger("pool", strings.Repeat("x", 2*maxKedaRequest))), codes.ResourceExhausted, "larger than max")
	check(isActive(trigger("pool", "new")), codes.Unavailable, `"new"`)
	d.pools.Store(nil)
	check(isActive(trigger()), codes.Unavailable, "no dispatcher leads")
	check(metric(kedaMetric, trigger()), codes.Unavailable, "no dispatcher leads")
}

func TestKedaStream(t *testing.T) {
	d := &dispatcher{}
	client := serveKeda(t, d)
	stream, err := client.StreamIsActive(t.Context(), trigger()) // no dispatcher leads yet
	if err != nil {
		t.Fatal(err)
	}
	for i, workers := range []int{0, 1, 0, 4} { // idle at first, then from zero and back
		d.set(pool("default", workers))
		got, err := stream.Recv()
		if err != nil || got.Result != (workers > 0) {
			t.Fatalf("message %d: got %v, %v, want workers %d", i, got, err, workers)
		}
		d.pools.Store(nil) // the stream survives a change of the leader
	}
}

// The manifest is given to the scaler as KEDA does it.
func TestScaledObject(t *testing.T) {
	text, err := os.ReadFile("../../../deploy/kubernetes/scaledobject.yaml")
	if err != nil {
		t.Fatal(err)
	}
	d := &dispatcher{}
	d.set(pool("default", 2))
	client := serveKeda(t, d)
	triggers := 0
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var object struct {
			Kind     string
			Metadata struct{ Name, Namespace string }
			Spec     struct {
				Triggers []struct {
					Type     string
					Metadata map[string]string
				}
			}
		}
		if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		for _, tr := range object.Spec.Triggers {
			triggers++
			ref := &externalscaler.ScaledObjectRef{
				Name: object.Metadata.Name, Namespace: object.Metadata.Namespace,
				ScalerMetadata: tr.Metadata,
			}
			if object.Kind != "ScaledObject" || tr.Type != "external-push" || tr.Metadata["scalerAddress"] == "" {
				t.Errorf("%s has trigger %+v", object.Kind, tr)
			}
			spec, err := client.GetMetricSpec(t.Context(), ref)
			if err != nil {
				t.Fatal(err)
			}
			values, err := client.GetMetrics(
				t.Context(), &externalscaler.GetMetricsRequest{ScaledObjectRef: ref, MetricName: spec.MetricSpecs[0].MetricName})
			if err != nil || values.MetricValues[0].MetricValue != 2 {
				t.Errorf("got %v, %v", values, err)
			}
		}
	}
	if triggers != 1 {
		t.Errorf("the manifest has %d triggers", triggers)
	}
}
