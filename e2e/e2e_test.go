package e2e

import (
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain runs more tests side by side than there are processors, unless -parallel sets a number: tests wait most of
// their time, for leases to expire and for servers to start.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// TestE2E runs the built program with real jails and real HTTP, the same tests on each topology.
func TestE2E(t *testing.T) {
	p := buildPrograms(t)
	for _, in := range topologies() {
		t.Run(strings.ReplaceAll(in.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			t.Run("shared", func(t *testing.T) {
				t.Parallel()
				args := []string{"--output-limit", "2MiB", "--queue-wait", "1m"}
				if in.apart { // what the other topology keeps in a directory
					args = append(args, p.newBucket(t).flags()...)
				}
				runShared(t, newWorld(t, p, in, manySlots, append(args, madeAhead...)...))
			})
			for name, test := range ownWorld() {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					test(t, p, in)
				})
			}
		})
	}
	for name, test := range map[string]func(*testing.T, *programs){
		"docs": testDocs, "cluster-leaders": testClusterLeaders, "cluster-nodes": testClusterNodes, "data-lock": testDataLock, "drain-async": testDrainAsync, "no-worker": testNoWorker, "two-gateways": testTwoGateways,
		"threads-killed-directory": testThreadsKilledDirectory, "threads-store-fails": testThreadsStoreFails, "threads-frozen": testThreadsFrozen,
		"worker-first": testWorkerFirst, "credentials": testCredentials, "image": testImage, "redis": testRedis, "no-nsjail": testNoNsjail,
		"overload": testOverload, "idle-streams": testIdleStreams, "slow-reader": testSlowReader,
		"thread-processes": testThreadProcesses, "thread-rebuild": testThreadRebuild,
		"rolling-cluster":       func(t *testing.T, p *programs) { testRolling(t, p, onCluster()) },
		"backup-ledger-cluster": func(t *testing.T, p *programs) { testBackupLedger(t, p, onCluster()) },
		"no-faults":             testNoFaults, "ledger-bites": testLedgerBites, "ledger-cluster": func(t *testing.T, p *programs) { testLedger(t, p, onCluster()) },
		"dispatcher-frozen":         testDispatcherFrozen,
		"dispatcher-killed":         func(t *testing.T, p *programs) { testDispatcherKilled(t, p, topology{apart: true}) },
		"dispatcher-killed-cluster": func(t *testing.T, p *programs) { testDispatcherKilled(t, p, onCluster()) },
		"costs":                     testCosts, "copies": testCopies, "durable-writes": testDurableWrites, "workers-lost": testWorkersLost, "server-lost": testServerLost, "worker-frozen": testWorkerFrozen, "golden": testGolden,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, p)
		})
	}
}

// ownWorld are the tests that stop servers or fill them, each with a deployment of its own, on every topology.
func ownWorld() map[string]func(*testing.T, *programs, topology) {
	return map[string]func(*testing.T, *programs, topology){
		"drain": testDrain, "drain-over": testDrainOver, "rolling": testRolling, "backup": testBackup, "backup-ledger": testBackupLedger, "one-slot": testOneSlot,
		"webhooks": testWebhooks, "webhooks-killed": testWebhooksKilled, "threads-killed": testThreadsKilled,
		"network": testNetwork, "store": testStore, "sandbox-images": testSandboxImages, "unfit": testUnfit, "unfit-at-start": testUnfitAtStart,
		"thread-expiry": testThreadExpiry, "crash-points": testCrashPoints, "ledger": testLedger, "limits-killed": testLimitsKilled, "warm": testWarm,
	}
}

// runShared runs what leaves a deployment as it was.
func runShared(t *testing.T, w *world) {
	for name, test := range map[string]func(*testing.T, *api){
		"programs": testPrograms, "ways-to-die": testWaysToDie, "streaming": testStreaming, "eviction": testEviction,
		"async": testAsync, "sse": testSSE, "record": testRecord, "cancel": testCancel, "limits-of-output": testOutputLimit,
		"large": testLarge, "keys": testKeys, "free-plan": testFreePlan,
		"idempotency": testIdempotency, "idempotency-at-once": testIdempotencyAtOnce, "health": testHealth, "routes": testRoutes,
		"big-body": testBigBody, "slow-headers": testSlowHeaders, "big-headers": testBigHeaders, "many-at-once": testManyAtOnce,
		"profile-limits": testProfileLimits,
		"thread-home":    testThreadHome, "thread-ends": testThreadEnds, "thread-modules": testThreadModules, "thread-program": testThreadProgram,
		"thread-organisations": testThreadOrganisations, "thread-busy": testThreadBusy, "threads-at-once": testThreadsAtOnce,
		"thread-in-a-row": func(t *testing.T, a *api) { testThreadInARow(t, 30, a) }, "thread-limits": testThreadLimits,
		"thread-upload-limits": testThreadUploadLimits, "thread-refused": testThreadRefused, "files-in-the-way": testFilesInTheWay,
		"file-uploads": testFileUploads, "file-downloads": testFileDownloads, "signed-urls": testSignedURLs,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, w.in(t))
		})
	}
	t.Run("scripts", func(t *testing.T) { // scripts are parallel by themselves
		testscript.Run(t, testscript.Params{
			Dir:                 filepath.Join("testdata", "script"),
			RequireExplicitExec: true,
			RequireUniqueNames:  true,
			Setup: func(env *testscript.Env) error {
				env.Setenv("PATH", w.programs.dir+string(filepath.ListSeparator)+env.Getenv("PATH"))
				env.Setenv("BULLPEN_URL", w.base)
				env.Setenv("BULLPEN_API_KEY", w.key)
				env.Setenv("BULLPEN_NSJAIL", w.programs.nsjail)
				env.Setenv("PROGRAMS", w.programs.dir)
				return nil
			},
		})
	})
}
