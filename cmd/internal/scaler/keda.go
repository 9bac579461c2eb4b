package scaler

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/bullpen-run/bullpen/cmd/internal/scaler/externalscaler"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	// kedaMetric is the metric of each trigger. Its target is one for each replica.
	kedaMetric = "bullpen_desired_workers"
	// kedaPollEvery is how often a stream asks the dispatcher, which evaluates at the same rate.
	kedaPollEvery = 200 * time.Millisecond
	// maxKedaRequest bounds a request, in bytes, maxKedaStreams the open requests of a connection.
	maxKedaRequest = 64 << 10
	maxKedaStreams = 256
	// kedaPing is after how long without traffic a connection is checked.
	kedaPing = time.Minute
)

// kedaKeys are the members of a trigger's metadata that KEDA itself reads, and passes on.
var kedaKeys = []string{"scalerAddress", "enableTLS", "unsafeSsl"} // read only

// Keda is an external scaler for KEDA, which asks it how many replicas a worker workload should
// have. It serves any number of pools.
type Keda struct {
	externalscaler.UnimplementedExternalScalerServer
	// Pools returns the pools with what the leading dispatcher recommends.
	Pools func(context.Context) ([]proto.Pool, error)
	Log   *slog.Logger
}

// Serve answers KEDA until ctx is done. It closes the listener.
func (k *Keda) Serve(ctx context.Context, listener net.Listener) error {
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxKedaRequest), grpc.MaxConcurrentStreams(maxKedaStreams),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: kedaPing}), grpc.WaitForHandlers(true))
	externalscaler.RegisterExternalScalerServer(server, k)
	defer context.AfterFunc(ctx, server.Stop)()
	k.Log.Info("serving KEDA", "address", listener.Addr().String())
	if err := server.Serve(listener); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serve KEDA: %w", err)
	}
	server.Stop() // returns when no request is open
	return nil
}

// poolOf returns the pool that the metadata of a trigger names.
func poolOf(ref *externalscaler.ScaledObjectRef) (string, error) {
	metadata := ref.GetScalerMetadata()
	for _, key := range slices.Sorted(maps.Keys(metadata)) {
		if key != "pool" && !slices.Contains(kedaKeys, key) {
			return "", status.Errorf(codes.InvalidArgument,
				"unknown member %q of the trigger's metadata: there are scalerAddress and pool", key)
		}
	}
	return cmp.Or(metadata["pool"], proto.DefaultPool), nil
}

// desired returns how many workers the pool of a trigger should have.
func (k *Keda) desired(ctx context.Context, ref *externalscaler.ScaledObjectRef) (int, error) {
	name, err := poolOf(ref)
	if err != nil {
		return 0, err
	}
	pools, err := k.Pools(ctx)
	if err != nil {
		return 0, status.Errorf(codes.Unavailable, "the leading dispatcher does not answer: %v", err)
	}
	i := slices.IndexFunc(pools, func(p proto.Pool) bool { return p.Name == name })
	switch {
	case i < 0 && name != proto.DefaultPool:
		return 0, status.Errorf(codes.InvalidArgument,
			"unknown pool %q: check the trigger's metadata, or start a worker with --pool, which makes the pool known", name)
	case i < 0 || pools[i].Desired == nil:
		return 0, status.Errorf(codes.Unavailable, "the leading dispatcher recommends nothing for pool %q yet", name)
	}
	return pools[i].Desired.Workers, nil
}

// IsActive implements [externalscaler.ExternalScalerServer].
func (k *Keda) IsActive(
	ctx context.Context, ref *externalscaler.ScaledObjectRef,
) (*externalscaler.IsActiveResponse, error) {
	workers, err := k.desired(ctx, ref)
	if err != nil {
		return nil, err
	}
	return &externalscaler.IsActiveResponse{Result: workers > 0}, nil
}

// StreamIsActive implements [externalscaler.ExternalScalerServer]. A stream stays open while no
// dispatcher leads, because KEDA waits up to a minute before it opens another one.
func (k *Keda) StreamIsActive(
	ref *externalscaler.ScaledObjectRef, stream externalscaler.ExternalScaler_StreamIsActiveServer,
) error {
	ctx := stream.Context()
	tick := time.NewTicker(kedaPollEvery)
	defer tick.Stop()
	for sent, last := false, false; ; {
		workers, err := k.desired(ctx, ref)
		switch {
		case ctx.Err() != nil:
			return status.FromContextError(ctx.Err()).Err()
		case status.Code(err) == codes.Unavailable: // a later poll may succeed
		case err != nil:
			return err
		case !sent || last != (workers > 0):
			sent, last = true, workers > 0
			if err := stream.Send(&externalscaler.IsActiveResponse{Result: last}); err != nil {
				return fmt.Errorf("send to KEDA: %w", err)
			}
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// GetMetricSpec implements [externalscaler.ExternalScalerServer].
func (k *Keda) GetMetricSpec(
	_ context.Context, ref *externalscaler.ScaledObjectRef,
) (*externalscaler.GetMetricSpecResponse, error) {
	if _, err := poolOf(ref); err != nil {
		return nil, err
	}
	return &externalscaler.GetMetricSpecResponse{
		MetricSpecs: []*externalscaler.MetricSpec{{MetricName: kedaMetric, TargetSize: 1, TargetSizeFloat: 1}},
	}, nil
}

// GetMetrics implements [externalscaler.ExternalScalerServer].
func (k *Keda) GetMetrics(
	ctx context.Context, r *externalscaler.GetMetricsRequest,
) (*externalscaler.GetMetricsResponse, error) {
	if r.GetMetricName() != kedaMetric {
		return nil, status.Errorf(codes.InvalidArgument, "unknown metric %q: there is %s", r.GetMetricName(), kedaMetric)
	}
	workers, err := k.desired(ctx, r.GetScaledObjectRef())
	if err != nil {
		return nil, err
	}
	return &externalscaler.GetMetricsResponse{
		MetricValues: []*externalscaler.MetricValue{
			{MetricName: kedaMetric, MetricValue: int64(workers), MetricValueFloat: float64(workers)},
		},
	}, nil
}
