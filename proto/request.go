package proto

// MaxKeptRequest is the size of the largest request that an execution keeps: the bytes of code,
// arguments and standard input together. Every process that waits for a record receives it, so the
// request in it must be small.
const MaxKeptRequest = 64 << 10

// Request is the part of a submitted request that [Meta] does not have. It has no values of
// environment variables.
type Request struct {
	Code      string   `json:"code"`
	Args      []string `json:"args,omitempty"`
	Stdin     string   `json:"stdin,omitempty"`
	KillGrace *Seconds `json:"kill_grace,omitempty"`
	Rich      bool     `json:"rich,omitempty"`
	Requested
}

// Requested is the part of a submitted request that a [Job] has merged with the settings of key and
// profile.
type Requested struct {
	EnvNames []string `json:"env_names,omitempty"` // in ascending order
	SubPaths []string `json:"sub_paths,omitempty"`
	Image    string   `json:"image,omitempty"` // instead of the profile's
}

// Request returns the request that the execution keeps. It is nil for the guest of a live sandbox,
// for an item of a batch, for a request of more than [MaxKeptRequest] bytes, and for a job of a
// version that did not store [Job.Requested].
func (j *Job) Request() *Request {
	size := len(j.Code) + len(j.Stdin)
	for _, arg := range j.Args {
		size += len(arg)
	}
	if j.Requested == nil || j.SandboxID != "" || j.Batch != "" || size > MaxKeptRequest {
		return nil
	}
	return &Request{
		Code: j.Code, Args: j.Args, Stdin: j.Stdin, KillGrace: j.KillGrace, Rich: j.Rich, Requested: *j.Requested,
	}
}
