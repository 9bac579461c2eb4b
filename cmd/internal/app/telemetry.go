package app

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/contrib/propagators/autoprop"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
)

// NewLogger makes the logger of a process, which writes to w.
func NewLogger(w io.Writer, level slog.Level, format LogFormat) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if format == LogJSON {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// Telemetry makes spans and sends them where the standard environment variables OTEL_… say. Where they say nothing it sends
// nothing and opens no connection; spans then carry ids and nothing else.
type Telemetry struct {
	// Tracers makes the tracers of the rooms.
	Tracers trace.TracerProvider
	// Propagator carries span contexts in headers, in the forms that OTEL_PROPAGATORS names (default: W3C).
	Propagator propagation.TextMapPropagator

	provider *sdktrace.TracerProvider
}

// StartTelemetry sets tracing up. It also makes Tracers and Propagator the process's defaults, for libraries that take no
// other. Exporters report their failures to log. The caller calls Shutdown.
func StartTelemetry(ctx context.Context, version string, log *slog.Logger) (*Telemetry, error) {
	exporter, err := newSpanExporter(ctx)
	if err != nil {
		return nil, fmt.Errorf("telemetry: exporter %q: %w; see OTEL_TRACES_EXPORTER and its kin", os.Getenv("OTEL_TRACES_EXPORTER"), err)
	}
	res, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "bullpen"), attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("telemetry: describe this process: %w", err)
	}
	opts := []sdktrace.TracerProviderOption{sdktrace.WithResource(res), sdktrace.WithIDGenerator(traceIDs{})}
	if exporter == nil || autoexport.IsNoneSpanExporter(exporter) {
		opts = append(opts, sdktrace.WithSampler(sdktrace.NeverSample()))
	} else {
		opts = append(opts, sdktrace.WithBatcher(exporter))
	}
	t := &Telemetry{Propagator: autoprop.NewTextMapPropagator(), provider: sdktrace.NewTracerProvider(opts...)}
	t.Tracers = t.provider
	otel.SetTracerProvider(t.Tracers)
	otel.SetTextMapPropagator(t.Propagator)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Warn("telemetry", slog.Any("error", err))
	}))
	return t, nil
}

// newSpanExporter gives the exporter that the environment names, and nil where it names neither an exporter nor an endpoint:
// the library's own default is a collector on this host, which is there for few.
func newSpanExporter(ctx context.Context) (sdktrace.SpanExporter, error) {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return nil, nil
	}
	for _, name := range []string{"OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} {
		if os.Getenv(name) != "" {
			return autoexport.NewSpanExporter(ctx)
		}
	}
	return nil, nil
}

// Shutdown sends the spans that are still here, for as long as ctx allows, and stops.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	if err := t.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("send the last spans: %w", err)
	}
	return nil
}

// traceIDs gives the spans of an execution the trace id that its own id says, so that each finds the other.
type traceIDs struct{}

// NewIDs gives a trace id and the id of its first span.
func (traceIDs) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	if t, ok := proto.TraceIDFromContext(ctx); ok {
		if id, err := t.OTel(); err == nil {
			return id, newSpanID()
		}
	}
	var id trace.TraceID
	_, _ = rand.Read(id[:]) // crypto/rand.Read never returns an error since Go 1.24
	return id, newSpanID()
}

// NewSpanID gives the id of a further span of a trace.
func (traceIDs) NewSpanID(context.Context, trace.TraceID) trace.SpanID { return newSpanID() }

func newSpanID() trace.SpanID {
	var id trace.SpanID
	_, _ = rand.Read(id[:])
	return id
}
