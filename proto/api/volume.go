package api

import "github.com/bullpen-run/bullpen/proto"

// ForkVolumeRequest asks for a new volume that begins with the files of another. It has the quota and
// the prefix of that one.
type ForkVolumeRequest struct {
	Slug        string `json:"slug" required:"true" pattern:"^[a-z0-9][a-z0-9_-]{0,62}$" doc:"The slug of the new storage connection."`
	Version     int64  `json:"version,omitempty" minimum:"1" must:"be a whole number, at least 1" doc:"The newest if absent."`
	ReadOnly    bool   `json:"read_only,omitempty" default:"false" doc:"Programs cannot change the new volume: it is a snapshot."`
	Description string `json:"description,omitempty" maxLength:"256" doc:"For people."`
}

// Volume is what is stored of a volume.
type Volume struct {
	Slug     string          `json:"slug"`
	Quota    proto.Bytes     `json:"quota" doc:"The limit of bytes."`
	Version  int64           `json:"version" minimum:"0" doc:"The number of the newest version; 0 while there is none."`
	Bytes    int64           `json:"bytes" minimum:"0" doc:"Content of the newest version's files."`
	Files    int64           `json:"files" minimum:"0" doc:"Files, directories and links of the newest version."`
	UsedAt   Time            `json:"used_at" doc:"When an execution last took the volume to change it."`
	Holder   *proto.TraceID  `json:"holder" doc:"The trace id of the execution that can change the volume, queued or running; null if there is none."`
	Versions []ThreadVersion `json:"versions" doc:"The newest first."`
}

// NewVolume returns the form of a volume.
func NewVolume(c *proto.Connection, head *proto.Thread) Volume {
	t := NewWholeThread(head)
	return Volume{
		Slug: c.Slug, Quota: proto.Bytes(c.Bytes), Version: t.Version, Bytes: t.Bytes, Files: t.Files, UsedAt: t.UsedAt,
		Holder: t.Holder, Versions: t.Versions,
	}
}
