package api

import "github.com/bullpen-run/bullpen/proto"

// Thread is a thread in a list.
type Thread struct {
	ID        string         `json:"id" format:"thread-id"`
	Version   int64          `json:"version" minimum:"0" doc:"The number of the newest version; 0 while there is none."`
	Bytes     int64          `json:"bytes" minimum:"0" doc:"Content of the newest version's files."`
	Files     int64          `json:"files" minimum:"0" doc:"Files, directories and links of the newest version."`
	CreatedAt Time           `json:"created_at"`
	UsedAt    Time           `json:"used_at" doc:"When an execution last took the thread, or a file was last uploaded."`
	Holder    *proto.TraceID `json:"holder" doc:"The trace id of the execution that holds the thread, queued or running; null if it is free."`
}

// Threads is a page of threads.
type Threads struct {
	Threads    []Thread `json:"threads"`
	NextCursor *string  `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// WholeThread is a thread with its versions and uploaded files.
type WholeThread struct {
	Thread
	Versions []ThreadVersion `json:"versions" doc:"The newest first."`
	Staged   []StagedFile    `json:"staged" doc:"Uploaded files that are in no version yet, the oldest first. The next execution finds them in its home."`
}

// ThreadVersion is a version of a thread's home that can be forked and downloaded.
type ThreadVersion struct {
	Number    int64          `json:"number" minimum:"1"`
	CreatedAt Time           `json:"created_at"`
	TraceID   *proto.TraceID `json:"trace_id" doc:"The execution that made it; null for the first version of a fork and for a change of files."`
	Bytes     int64          `json:"bytes" minimum:"0"`
	Files     int64          `json:"files" minimum:"0"`
}

// StagedFile is an uploaded file that is in no version yet.
type StagedFile struct {
	Path string `json:"path"`
	Size int64  `json:"size" minimum:"0" doc:"Bytes."`
	At   Time   `json:"at" doc:"When it was uploaded."`
}

// NewThread returns the form of a thread in lists.
func NewThread(t proto.ThreadSummary) Thread {
	return Thread{
		ID: t.ID, Version: t.Version, Bytes: t.Bytes, Files: t.Files, CreatedAt: Time{t.CreatedAt}, UsedAt: Time{t.UsedAt},
		Holder: optional(t.Holder),
	}
}

// NewWholeThread returns the form of a thread with its versions and staged files.
func NewWholeThread(t *proto.Thread) *WholeThread {
	whole := &WholeThread{Thread: NewThread(t.Summary()), Versions: []ThreadVersion{}, Staged: []StagedFile{}}
	versions := t.History
	if t.Version != nil {
		versions = append([]proto.Version{*t.Version}, versions...)
	}
	for i := range versions {
		v := &versions[i]
		whole.Versions = append(whole.Versions,
			ThreadVersion{v.Number, Time{v.CreatedAt}, optional(v.Trace), v.Bytes, v.Files})
	}
	for _, f := range t.Staged {
		whole.Staged = append(whole.Staged, StagedFile{f.Path, f.Size, Time{f.At}})
	}
	return whole
}

// ForkRequest asks for a new thread that starts from a version of another.
type ForkRequest struct {
	ID      string `json:"id" required:"true" format:"thread-id" doc:"The id of the new thread."`
	Version int64  `json:"version,omitempty" minimum:"1" must:"be a whole number, at least 1" doc:"The newest if absent."`
}

// CollectRequest asks for garbage collection in the store of threads.
type CollectRequest struct {
	SafeAge proto.Seconds `json:"safe_age,omitempty" default:"86400" minimum:"7200" maximum:"31536000" doc:"Seconds."`
}
