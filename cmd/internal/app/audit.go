package app

import "github.com/bullpen-run/bullpen/scheduler/audit"

// auditSinks returns the parts that forward the audit log to the configured sinks.
func (s *system) auditSinks() (parts []part, err error) {
	add := func(name string, sink audit.Sink) {
		f := &audit.Forwarder{Log: &audit.Log{Store: s.store}, Sink: sink, Name: name, Instance: s.instance, Logger: s.log}
		parts = append(parts, part{name, f.Run})
	}
	if s.cfg.AuditHTTP != "" {
		add("audit-http", &audit.HTTPSink{URL: s.cfg.AuditHTTP, UserAgent: "bullpen/" + Version()})
	}
	if s.cfg.AuditSyslog != "" {
		sink, err := audit.NewSyslogSink(s.cfg.AuditSyslog)
		if err != nil {
			return nil, err
		}
		add("audit-syslog", sink)
	}
	return parts, nil
}
