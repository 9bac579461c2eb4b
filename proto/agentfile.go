package proto

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"io"
	"mime"
	"path"
	"strings"
	"time"
	"unicode/utf8"
)

// MaxAgentFiles is the number of files that an organisation has for its agents.
const MaxAgentFiles = 10_000

// AgentFileContent is the path of the content of an [AgentFile] in its thread.
const AgentFileContent = "content"

const agentFilePrefix = "file_"

// AgentFile describes a file of an organisation that its agents' programs receive or have written.
// Its content is in a thread of its own.
type AgentFile struct {
	Org       string     `json:"org"`
	ID        string     `json:"id"`
	Name      string     `json:"name"` // one component of a path
	MIMEType  string     `json:"mime_type"`
	Bytes     int64      `json:"bytes"`
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"` // nil for never
	Generated bool       `json:"generated,omitempty"`  // a program left it
	// Container and Path are where the program left the file, empty for an upload. A path in a
	// container has one file, with the newest content.
	Container string `json:"container,omitempty"`
	Path      string `json:"path,omitempty"`
}

// Thread returns the id of the thread that has the content.
func (f *AgentFile) Thread() string { return OwnerAgentFile.Thread(f.ID) }

// Expired reports whether the file has expired at a time.
func (f *AgentFile) Expired(now time.Time) bool {
	return f.ExpiresAt != nil && !now.Before(*f.ExpiresAt)
}

// NewAgentFile returns a file with a new id and the base name of name. An invalid name becomes
// "unnamed" with the same extension.
func NewAgentFile(name string, size int64) *AgentFile {
	name = name[strings.LastIndexAny(name, `/\`)+1:]
	extension := path.Ext(name)
	if stem := strings.TrimSuffix(name, extension); stem == "" || name == "." || name == ".." ||
		len(name) > MaxFileNameBytes || !utf8.ValidString(name) || strings.ContainsRune(name, 0) {
		if len(extension) > 16 || !utf8.ValidString(extension) || strings.ContainsRune(extension, 0) || extension == "." {
			extension = ""
		}
		name = "unnamed" + extension
	}
	kind := mime.TypeByExtension(path.Ext(name))
	if kind == "" {
		kind = "application/octet-stream"
	}
	if plain, _, err := mime.ParseMediaType(kind); err == nil {
		kind = plain
	}
	return &AgentFile{
		ID: agentFilePrefix + strings.ToLower(rand.Text()), Name: name, MIMEType: kind, Bytes: size,
		CreatedAt: time.Now().UTC(),
	}
}

// NewContainerFile returns the file at a path in a container. Its id depends on both alone.
func NewContainerFile(org, container, name string, size int64) *AgentFile {
	f := NewAgentFile(path.Base(name), size)
	sum := sha256.Sum256([]byte(org + "\n" + container + "\n" + name))
	id := strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:]))
	f.ID = agentFilePrefix + id[:len(f.ID)-len(agentFilePrefix)]
	f.Generated, f.Container, f.Path = true, container, name
	return f
}

// ValidAgentFileID reports whether an id has the form of the ids of files.
func ValidAgentFileID(id string) bool {
	rest, ok := strings.CutPrefix(id, agentFilePrefix)
	return ok && len(rest) == len(rand.Text()) && strings.Trim(rest, "abcdefghijklmnopqrstuvwxyz234567") == ""
}

// AgentUpload is a form with a file.
type AgentUpload struct {
	io.ReadCloser                   // of the content
	Name          string            // as the client wrote it
	ContentType   string            // as the client wrote it; empty for none
	Size          int64             // bytes of the content
	Fields        map[string]string // the other parts of the form
}
