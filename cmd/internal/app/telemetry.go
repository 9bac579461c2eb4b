package app

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"go.opentelemetry.io/contrib/bridges/otelslog"
	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	otellog "go.opentelemetry.io/otel/log"
	sdklog "go.opentelemetry.io/otel/sdk/log"
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

// Telemetry exports spans as configured by the standard environment variables OTEL_…, and log
// records if these name an endpoint or an exporter for logs. Without them it does nothing.
type Telemetry struct {
	// Tracers provides the tracers of all packages.
	Tracers trace.TracerProvider
	// Log is the logger of StartTelemetry, whose records are exported too.
	Log *slog.Logger

	shutdown []func(context.Context) error
}

// StartTelemetry starts tracing and makes Tracers the default of the process. It exports the log
// records of at least the given level. Exporters report errors to log alone. The caller must call
// Shutdown.
func StartTelemetry(ctx context.Context, version string, log *slog.Logger, level slog.Level) (*Telemetry, error) {
	t := &Telemetry{Tracers: noop.NewTracerProvider(), Log: log}
	res, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "bullpen"), attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("telemetry: resource: %w", err)
	}
	if exports("TRACES") {
		exporter, err := autoexport.NewSpanExporter(ctx)
		if err != nil {
			return nil, fmt.Errorf("telemetry: exporter of spans %q: %w; see the OTEL_… variables",
				os.Getenv("OTEL_TRACES_EXPORTER"), err)
		}
		provider := sdktrace.NewTracerProvider(sdktrace.WithResource(res), sdktrace.WithIDGenerator(traceIDs{}),
			sdktrace.WithBatcher(exporter))
		t.Tracers, t.shutdown = provider, append(t.shutdown, provider.Shutdown)
	}
	if exports("LOGS") {
		exporter, err := autoexport.NewLogExporter(ctx)
		if err != nil {
			return nil, fmt.Errorf("telemetry: exporter of logs %q: %w; see the OTEL_… variables",
				os.Getenv("OTEL_LOGS_EXPORTER"), err)
		}
		provider := sdklog.NewLoggerProvider(sdklog.WithResource(res),
			sdklog.WithProcessor(leveled{sdklog.NewBatchProcessor(exporter), level}))
		t.Log = slog.New(slog.NewMultiHandler(
			log.Handler(), otelslog.NewHandler("bullpen", otelslog.WithLoggerProvider(provider))))
		t.shutdown = append(t.shutdown, provider.Shutdown)
	}
	otel.SetTracerProvider(t.Tracers)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Warn("telemetry error", slog.Any("error", err))
	}))
	return t, nil
}

// exports reports whether the environment has an exporter or an endpoint for a signal. The library
// would default to a collector on this host.
func exports(signal string) bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || os.Getenv("OTEL_"+signal+"_EXPORTER") == "none" {
		return false
	}
	for _, name := range []string{
		"OTEL_" + signal + "_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT",
		"OTEL_EXPORTER_OTLP_" + signal + "_ENDPOINT",
	} {
		if os.Getenv(name) != "" {
			return true
		}
	}
	return false
}

// leveled processes the log records of at least a level.
type leveled struct {
	*sdklog.BatchProcessor
	level slog.Level
}

// Enabled reports whether a record of that severity is processed.
func (l leveled) Enabled(_ context.Context, p sdklog.EnabledParameters) bool {
	const info = slog.Level(otellog.SeverityInfo) // severities have the distances of levels
	return slog.Level(p.Severity)-info >= l.level
}

// Shutdown exports the remaining spans and log records until ctx is done, and stops.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	var errs []error
	for _, shutdown := range t.shutdown {
		errs = append(errs, shutdown(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("export the last spans and log records: %w", err)
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
