package proto

import "strings"

// ThreadOwner owns threads that no request can name. Users' threads have no owner.
//
// The id of an owned thread is the owner, a = and a name. [CheckThreadID] rejects such ids, so
// every route that checks ids is closed to owned threads, and an owner's threads cannot collide
// with those of users or of another owner.
type ThreadOwner string

// The owners.
const (
	OwnerVolume    ThreadOwner = "volume"    // the files of a storage connection; the name is its slug
	OwnerPipeline  ThreadOwner = "pipeline"  // workspaces and artifacts of runs; the name begins with the run's id
	OwnerCache     ThreadOwner = "cache"     // caches of pipelines, by key
	OwnerContainer ThreadOwner = "container" // containers of agents, by id
	OwnerAgentFile ThreadOwner = "agentfile" // files of agents, by id
	OwnerSandbox   ThreadOwner = "sandbox"   // homes that were created for live sandboxes, by id
)

// ThreadOwners returns all owners.
func ThreadOwners() []ThreadOwner {
	return []ThreadOwner{OwnerVolume, OwnerPipeline, OwnerCache, OwnerContainer, OwnerAgentFile, OwnerSandbox}
}

// Thread returns the id of the owner's thread of a name.
func (o ThreadOwner) Thread(name string) string { return string(o) + "=" + name }

// NameOf returns the name of a thread in the owner's name space. ok is false for other threads.
func (o ThreadOwner) NameOf(thread string) (name string, ok bool) {
	return strings.CutPrefix(thread, string(o)+"=")
}

// ThreadOwned reports whether a thread has an owner.
func ThreadOwned(id string) bool { return strings.Contains(id, "=") }

// UserThread returns the id under which users see a thread, empty if the thread has an owner.
func UserThread(id string) string {
	if ThreadOwned(id) {
		return ""
	}
	return id
}

// Expires reports whether the thread is removed when it has not been used for a time. Volumes, files
// of agents and homes of live sandboxes are kept until they are deleted.
func (t *Thread) Expires() bool {
	_, volume := OwnerVolume.NameOf(t.ID)
	_, file := OwnerAgentFile.NameOf(t.ID)
	_, sandbox := OwnerSandbox.NameOf(t.ID)
	return !volume && !file && !sandbox
}

// threadName returns what messages call a thread.
func threadName(id string) string {
	owner, name, owned := strings.Cut(id, "=")
	switch ThreadOwner(owner) {
	case OwnerPipeline:
		return "workspace " + name
	case OwnerAgentFile:
		return "file " + name
	}
	if !owned {
		return "thread " + id
	}
	return owner + " " + name
}
