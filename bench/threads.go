package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// Parameters for measuring threads. They use their own server, whose store is an S3 server on this
// machine.
const (
	homeFiles      = 20_000
	homeFileBytes  = 25_000
	quickFiles     = 1000
	threadRuns     = 100 // per kind of call
	quickRuns      = 10
	restores       = 3
	forks          = 20
	largeFileBytes = 600 << 20
	quickLarge     = 50 << 20
	threadTimeout  = 300 // seconds, for large homes
	benchThread    = "bench"
	storePrefix    = "homes"
)

// threads holds the figures of threads. The added time is a call's p50 less the p50 of the same
// call without a thread. Both are measured in turn.
type threads struct {
	Files       int     `json:"files"`
	HomeMB      float64 `json:"home_mb"`
	Runs        int     `json:"runs"` // per kind of call
	PlainP50    float64 `json:"plain_p50_ms"`
	WarmAdds    float64 `json:"warm_adds_ms"`   // nothing changed
	ChangeAdds  float64 `json:"change_adds_ms"` // one file of 1 KB changed
	ChangeBytes float64 `json:"change_uploads_bytes"`
	RestoreMB   float64 `json:"restore_mb_per_second"` // slowest of several, with nothing cached on the worker
	ForkP50     float64 `json:"fork_p50_ms"`
	LargeMB     float64 `json:"large_file_mb"`
	// largest growth of the server's memory while it was saved and fetched
	LargeMemory float64 `json:"large_file_memory_mb"`
	SaveSeconds float64 `json:"first_save_seconds"` // of the whole home, including its creation
	endpoint    string  // of the S3 server
	starts      int     // number of server starts
	key         string  // key of executions in threads, whose sandbox fits the homes
}

// measureThreads measures calls with threads. dir holds the data of the server and its store.
func measureThreads(ctx context.Context, program, dir string, quick bool) (_ *threads, err error) {
	dir = filepath.Join(dir, "threads")
	m := &threads{Files: homeFiles, Runs: threadRuns}
	large := int64(largeFileBytes)
	if quick {
		m.Files, m.Runs, large = quickFiles, quickRuns, quickLarge
	}
	m.HomeMB = float64(m.Files) * homeFileBytes / mb
	s3, err := m.startStore(dir)
	if err != nil {
		return nil, fmt.Errorf("measure threads: %w", err)
	}
	defer func() { err = errors.Join(err, s3.Close()) }()
	t, err := m.server(ctx, program, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	if err := m.calls(ctx, t, s3.Path(storePrefix)); err != nil {
		return nil, fmt.Errorf("measure threads: %w", err)
	}
	if m.ForkP50, err = m.forks(ctx, t); err != nil {
		return nil, fmt.Errorf("measure forks of threads: %w", err)
	}
	if t, err = m.cold(ctx, t, program, dir); err != nil {
		return nil, fmt.Errorf("measure fetching homes: %w", err)
	}
	if t, err = m.large(ctx, t, program, dir, large); err != nil {
		return nil, fmt.Errorf("measure large files of threads: %w", err)
	}
	return m, nil
}

// startStore starts the S3 server, with its data in dir.
func (m *threads) startStore(dir string) (*storagetest.Server, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	s3, err := storagetest.Start(dir)
	if err != nil {
		return nil, err
	}
	if m.endpoint, err = s3.Endpoint(); err != nil {
		return nil, errors.Join(err, s3.Close())
	}
	return s3, nil
}

// server starts a server that uses the store.
func (m *threads) server(ctx context.Context, program, dir string, settings ...string) (*target, error) {
	settings = append(settings, "BULLPEN_STORE="+storagetest.StoreURL(m.endpoint, storePrefix))
	t, err := startServer(ctx, program, dir, append(storagetest.Env(), settings...)...)
	if err != nil {
		return nil, err
	}
	if err := t.ready(ctx); err != nil {
		return nil, errors.Join(err, t.close())
	}
	if m.key == "" {
		if m.key, err = largeHomeKey(ctx, t.api); err != nil {
			return nil, errors.Join(err, t.close())
		}
	}
	return t, nil
}

// largeHomeKey creates a key whose sandbox fits the homes.
func largeHomeKey(ctx context.Context, a *api) (string, error) {
	return profileKey(ctx, a, `{"name":"roomy","disk":{"home":"2GiB"}}`, "roomy")
}

// profileKey creates a sandbox profile, and a key of an organisation of its own for it.
func profileKey(ctx context.Context, a *api, profile, name string) (string, error) {
	for _, step := range [][2]string{
		{"/v1/admin/profiles", profile},
		{"/v1/admin/keys", fmt.Sprintf(`{"name":%[1]q,"org":%[1]q,"plan":"enterprise","profile":%[1]q}`, name)},
	} {
		resp, err := a.do(ctx, http.MethodPost, step[0], "application/json", []byte(step[1]))
		if err != nil {
			return "", err
		}
		var made struct{ Key string }
		if err := errors.Join(json.NewDecoder(resp.Body).Decode(&made), resp.Body.Close()); err != nil {
			return "", err
		}
		if made.Key != "" {
			return made.Key, nil
		}
	}
	return "", errors.New("make a key: the answer has none")
}

// withThreads returns a client that uses the key for executions in threads.
func (m *threads) withThreads(a *api) *api { return apiOf(a.url, m.key, a.http) }

// restart stops the server and starts it again with a worker that has no cached homes.
func (m *threads) restart(
	ctx context.Context, t *target, program, dir string, settings ...string,
) (*target, error) {
	if err := t.close(); err != nil {
		return t, err
	}
	// The old directory is kept. After a removal, ext4 would for minutes check each removed inode
	// before it creates a file, which takes several times as long.
	m.starts++
	homes := filepath.Join(dir, "data", "homes")
	if err := os.Rename(homes, fmt.Sprintf("%s-%d", homes, m.starts)); err != nil {
		return t, err
	}
	next, err := m.server(ctx, program, dir, settings...)
	if err != nil {
		return t, err
	}
	return next, nil
}

// run runs a program in a thread and returns its duration in milliseconds. If thread is empty, it
// runs without one.
func (m *threads) run(ctx context.Context, a *api, language proto.Language, thread, code string) (float64, error) {
	if thread != "" {
		a = m.withThreads(a)
	}
	body := asked{Language: language, Code: code, Timeout: threadTimeout, ThreadID: thread}
	began := time.Now()
	result, id, err := a.inline(ctx, body)
	took := millis(time.Since(began))
	if err == nil && !result.Success {
		text, _ := json.Marshal(result)
		err = fmt.Errorf("execution %s failed: %s", id, text)
	}
	return took, err
}

const makeHome = `
import os
for i in range(%d):
    d = "d%%d" %% (i // 100)
    if i %% 100 == 0: os.mkdir(d)
    with open("%%s/f%%d" %% (d, i %% 100), "wb") as f: f.write(os.urandom(%d))
`

// calls measures a call that changes nothing and one that changes a file, each against one without
// a thread.
func (m *threads) calls(ctx context.Context, t *target, objects string) error {
	took, err := m.run(ctx, t.api, proto.Python, benchThread, fmt.Sprintf(makeHome, m.Files, homeFileBytes))
	if err != nil {
		return err
	}
	m.SaveSeconds = took / 1000
	var plain, warm, change []float64
	stored := int64(0)
	for i := range m.Runs + 1 {
		p, err := m.run(ctx, t.api, proto.Bash, "", ":")
		if err != nil {
			return err
		}
		w, err := m.run(ctx, t.api, proto.Bash, benchThread, ":")
		if err != nil {
			return err
		}
		c, err := m.run(ctx, t.api, proto.Bash, benchThread, fmt.Sprintf("head -c 1000 /dev/urandom > d%d/f7", i%10))
		if err != nil {
			return err
		}
		if i == 0 { // warm-up
			if stored, err = bytesBelow(objects); err != nil {
				return err
			}
			continue
		}
		plain, warm, change = append(plain, p), append(warm, w), append(change, c)
	}
	after, err := bytesBelow(objects)
	if err != nil {
		return err
	}
	m.PlainP50 = summarise(plain).P50
	m.WarmAdds, m.ChangeAdds = summarise(warm).P50-m.PlainP50, summarise(change).P50-m.PlainP50
	m.ChangeBytes = float64(after-stored) / float64(m.Runs)
	return nil
}

// bytesBelow returns the total size of the files below a directory.
func bytesBelow(dir string) (int64, error) {
	total := int64(0)
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			total += info.Size()
		}
		return err
	})
	return total, err
}

func (m *threads) forks(ctx context.Context, t *target) (float64, error) {
	var took []float64
	for i := range forks {
		began := time.Now()
		resp, err := m.withThreads(t.api).do(ctx, http.MethodPost, "/v1/threads/"+benchThread+"/fork", "application/json",
			fmt.Appendf(nil, `{"id":"fork%d"}`, i))
		if err != nil {
			return 0, err
		}
		took = append(took, millis(time.Since(began)))
		if err := resp.Body.Close(); err != nil {
			return 0, err
		}
	}
	return summarise(took).P50, nil
}

// cold measures calls whose home has to be fetched.
func (m *threads) cold(ctx context.Context, t *target, program, dir string) (*target, error) {
	for range restores {
		var err error
		if t, err = m.restart(ctx, t, program, dir); err != nil {
			return t, err
		}
		if _, err := m.run(ctx, t.api, proto.Bash, "", ":"); err != nil {
			return t, err
		}
		took, err := m.run(ctx, t.api, proto.Bash, benchThread, ":")
		if err != nil {
			return t, err
		}
		rate := m.HomeMB / ((took - m.PlainP50) / 1000)
		if m.RestoreMB == 0 || rate < m.RestoreMB {
			m.RestoreMB = rate
		}
	}
	return t, nil
}

// large measures the effect of a large file on the server's memory.
func (m *threads) large(ctx context.Context, t *target, program, dir string, size int64) (*target, error) {
	m.LargeMB = float64(size) / mb
	t, err := m.restart(ctx, t, program, dir)
	if err != nil {
		return t, err
	}
	if _, err := m.run(ctx, t.api, proto.Bash, "", ":"); err != nil {
		return t, err
	}
	for _, code := range []string{fmt.Sprintf("head -c %d /dev/urandom > large", size), ":"} {
		memory := watchMemory(t.pid)
		_, err := m.run(ctx, t.api, proto.Bash, "large", code)
		before, peak := memory()
		if err != nil {
			return t, err
		}
		m.LargeMemory = max(m.LargeMemory, peak-before)
		if t, err = m.restart(ctx, t, program, dir); err != nil {
			return t, err
		}
	}
	return t, nil
}

// figures returns the figures of threads. m is nil if they were not measured.
func (m *threads) figures() []figure {
	warm := below("thread whose home is there and stays as it is adds, p50", targetWarmMS, "ms")
	change := below("thread in which a file of 1 KB changes adds, p50", targetChangeMS, "ms")
	bytes := below("and uploads", targetChangeBytes, "bytes")
	restore := figure{Name: "fetching a home", Target: fmt.Sprintf("%d MB/s or more", targetRestoreMB), Unit: "MB/s"}
	fork := below("fork of a thread, p50", targetForkMS, "ms")
	memory := below("memory that a large file takes", targetLargeMB, "MB")
	if m == nil {
		const why = "needs a server that is started here"
		return []figure{
			warm.unknown(why), change.unknown(why), bytes.unknown(why), restore.unknown(why), fork.unknown(why),
			memory.unknown(why),
		}
	}
	home := fmt.Sprintf("%d samples in turn, %.0f MB in %d files; without a thread %.1f ms", m.Runs, m.HomeMB,
		m.Files, m.PlainP50)
	return []figure{
		warm.is(m.WarmAdds, m.WarmAdds < targetWarmMS, home),
		change.is(m.ChangeAdds, m.ChangeAdds < targetChangeMS, home),
		bytes.is(m.ChangeBytes, m.ChangeBytes < targetChangeBytes, "all objects of a change, as the S3 server has them"),
		restore.is(m.RestoreMB, m.RestoreMB >= targetRestoreMB,
			fmt.Sprintf("the slowest of %d; made and saved in %.1f s", restores, m.SaveSeconds)),
		fork.is(m.ForkP50, m.ForkP50 < targetForkMS, fmt.Sprintf("%d samples", forks)),
		memory.is(m.LargeMemory, m.LargeMemory < targetLargeMB,
			fmt.Sprintf("%.0f MB in one file, saved and fetched", m.LargeMB)),
	}
}
