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
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/bullpen-run/bullpen/proto"
)

// NewLogger returns a logger that writes to w.
func NewLogger(w io.Writer, level slog.Level, format LogFormat) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if format == LogJSON {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// Telemetry records spans and exports them as the standard environment variables OTEL_… configure.
// Without them there are no spans.
type Telemetry struct {
	// Tracers provides the tracers of all packages.
	Tracers trace.TracerProvider

	shutdown func(context.Context) error
}

// StartTelemetry starts tracing and makes Tracers the default of the process. Exporters report
// errors to log. The caller must call Shutdown.
func StartTelemetry(ctx context.Context, version string, log *slog.Logger) (*Telemetry, error) {
	exporter, err := newSpanExporter(ctx)
	if err != nil {
		return nil, fmt.Errorf("telemetry: exporter %q: %w; see the OTEL_… variables", os.Getenv("OTEL_TRACES_EXPORTER"), err)
	}
	if exporter == nil || autoexport.IsNoneSpanExporter(exporter) {
		t := &Telemetry{Tracers: noop.NewTracerProvider(), shutdown: func(context.Context) error { return nil }}
		otel.SetTracerProvider(t.Tracers)
		return t, nil
	}
	res, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "bullpen"), attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("telemetry: resource: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithResource(res), sdktrace.WithIDGenerator(traceIDs{}), sdktrace.WithBatcher(exporter))
	t := &Telemetry{Tracers: provider, shutdown: provider.Shutdown}
	otel.SetTracerProvider(t.Tracers)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Warn("telemetry error", slog.Any("error", err))
	}))
	return t, nil
}

// newSpanExporter returns the exporter that the environment configures. It returns nil if the
// environment has neither an exporter nor an endpoint, unlike the library, which would default to a
// collector on this host.
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

// Shutdown exports the remaining spans until ctx is done, and stops.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	if err := t.shutdown(ctx); err != nil {
		return fmt.Errorf("export the last spans: %w", err)
	}
	return nil
}

// traceIDs derives the trace id of an execution's spans from the id of the execution.
type traceIDs struct{}

// NewIDs returns a trace id and the id of its first span.
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

// NewSpanID returns the id of another span of a trace.
func (traceIDs) NewSpanID(context.Context, trace.TraceID) trace.SpanID { return newSpanID() }

func newSpanID() trace.SpanID {
	var id trace.SpanID
	_, _ = rand.Read(id[:])
	return id
}
