package e2b

import (
	"math"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// started is the answer to a request that starts a sandbox.
type started struct {
	TemplateID         string  `json:"templateID"`
	SandboxID          string  `json:"sandboxID"`
	ClientID           string  `json:"clientID"`
	EnvdVersion        string  `json:"envdVersion"`
	EnvdAccessToken    string  `json:"envdAccessToken"`
	TrafficAccessToken *string `json:"trafficAccessToken"`
	Domain             *string `json:"domain"`
}

// listed is a sandbox in a list.
type listed struct {
	TemplateID  string            `json:"templateID"`
	Alias       string            `json:"alias"`
	SandboxID   string            `json:"sandboxID"`
	ClientID    string            `json:"clientID"`
	StartedAt   string            `json:"startedAt"`
	EndAt       string            `json:"endAt"`
	CPUCount    int               `json:"cpuCount"`
	MemoryMB    int64             `json:"memoryMB"`
	DiskSizeMB  int64             `json:"diskSizeMB"`
	State       state             `json:"state"`
	EnvdVersion string            `json:"envdVersion"`
	Metadata    map[string]string `json:"metadata"`
}

// detail is a sandbox alone.
type detail struct {
	listed

	EnvdAccessToken string    `json:"envdAccessToken,omitempty"`
	Domain          *string   `json:"domain"`
	Network         network   `json:"network"`
	Lifecycle       lifecycle `json:"lifecycle"`
	PauseMode       string    `json:"pauseMode,omitempty"` // of a paused one
}

type network struct {
	AllowPublicTraffic bool `json:"allowPublicTraffic"`
}

type lifecycle struct {
	AutoResume bool              `json:"autoResume"`
	OnTimeout  proto.SandboxStop `json:"onTimeout"`
}

// metric is what a sandbox uses at a time. Sizes are in bytes.
type metric struct {
	Timestamp     string  `json:"timestamp"`
	TimestampUnix int64   `json:"timestampUnix"`
	CPUCount      float64 `json:"cpuCount"`
	CPUUsedPct    float64 `json:"cpuUsedPct"`
	MemUsed       int64   `json:"memUsed"`
	MemTotal      int64   `json:"memTotal"`
	MemCache      int64   `json:"memCache"`
	DiskUsed      int64   `json:"diskUsed"`
	DiskTotal     int64   `json:"diskTotal"`
}

// state is the state of a sandbox for E2B's clients.
type state string

const (
	running state = "running"
	paused  state = "paused"
	// filesystemOnly is the mode of every pause.
	filesystemOnly = "filesystem"
)

// stateOf returns the state of a sandbox. alive is false for one that has ended or is ending, which E2B's
// clients do not see.
func stateOf(x *proto.LiveSandbox) (s state, alive bool) {
	switch x.State {
	case proto.SandboxStarting, proto.SandboxRunning:
		return running, true
	case proto.SandboxStopping:
		return running, x.Stopping == nil || x.Stopping.Stop == proto.SandboxPause
	case proto.SandboxPaused:
		return paused, true
	default:
		return "", false
	}
}

// templateOf returns the name of a sandbox's template.
func templateOf(x *proto.LiveSandbox) string {
	if x.Profile == "" {
		return baseTemplate
	}
	return x.Profile
}

func (s *Server) started(x *proto.LiveSandbox) started {
	answer := started{
		TemplateID: templateOf(x), SandboxID: x.ID, ClientID: clientID, EnvdVersion: guestVersion,
		EnvdAccessToken: s.Tokens.Access(x.ID), Domain: s.domain(),
	}
	if !x.PublicPorts {
		answer.TrafficAccessToken = new(s.Tokens.Traffic(x.ID))
	}
	return answer
}

func (s *Server) domain() *string {
	if s.Domain == "" {
		return nil
	}
	return new(s.Domain)
}

// newListed returns the form of a living sandbox with its profile.
func newListed(x *proto.LiveSandbox, p *proto.Profile) listed {
	const mib = int64(proto.MiB)
	form := listed{
		TemplateID: templateOf(x), Alias: templateOf(x), SandboxID: x.ID, ClientID: clientID, EnvdVersion: guestVersion,
		StartedAt: timeText(x.StartedAt), EndAt: timeText(x.ExpiresAt), CPUCount: int(math.Ceil(p.CPU)),
		MemoryMB: int64(p.Memory) / mib, DiskSizeMB: int64(p.Disk.Home) / mib, Metadata: x.Metadata,
	}
	form.State, _ = stateOf(x)
	if form.Metadata == nil {
		form.Metadata = map[string]string{}
	}
	return form
}

func (s *Server) newDetail(x *proto.LiveSandbox, p *proto.Profile) detail {
	form := detail{
		listed: newListed(x, p), EnvdAccessToken: s.Tokens.Access(x.ID), Domain: s.domain(),
		Network: network{x.PublicPorts}, Lifecycle: lifecycle{OnTimeout: x.OnTimeout},
	}
	if form.State == paused {
		form.PauseMode = filesystemOnly
	}
	return form
}

func timeText(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }
