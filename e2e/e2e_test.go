package e2e

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain runs more tests in parallel than there are processors, unless -parallel is set. Tests
// spend most of their time waiting for leases to expire and for servers to start.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// repeats is a flag for how often a test repeats something. Its default is smaller with -short.
type repeats struct {
	set        *int
	short, all int
}

func repeatsFlag(name string, short, all int, usage string) repeats {
	return repeats{flag.Int(name, 0, fmt.Sprintf("%s; 0 for %d, or %d with -short", usage, all, short)), short, all}
}

func (r repeats) n() int {
	switch {
	case *r.set > 0:
		return *r.set
	case testing.Short():
		return r.short
	default:
		return r.all
	}
}

// TestE2E runs the built program with real jails and real HTTP, with the same tests on each
// topology. With -short it runs them on separate processes only, and skips the long tests. Most
// singleTests are of one process.
func TestE2E(t *testing.T) {
	p := buildPrograms(t)
	for _, a := range controlAttacks() {
		t.Run("abuse/"+a.name, func(t *testing.T) {
			t.Parallel()
			a.test(t, p)
		})
	}
	t.Run("abuse/live", func(t *testing.T) {
		t.Parallel()
		testLiveAbuse(t, p)
	})
	for _, in := range topologies() {
		if testing.Short() && !in.separate {
			continue
		}
		t.Run(strings.ReplaceAll(in.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			t.Run("shared", func(t *testing.T) {
				t.Parallel()
				args := []string{"--output-limit", "2MiB", "--queue-wait", "1m", "--upgrade-url", upgradeURL}
				if in.separate { // the other topology stores threads in a directory
					args = append(args, p.newBucket(t).flags()...)
				}
				runShared(t, newSystem(t, p, in, manySlots, append(args, prewarmed...)...))
			})
			for name, test := range withLong(deploymentTests(), longDeploymentTests()) {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					test(t, p, in)
				})
			}
		})
	}
	for name, test := range withLong(singleTests(), longSingleTests()) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, p)
		})
	}
}

// withLong adds the long tests to the others, except with -short.
func withLong[T any](tests, long map[string]T) map[string]T {
	if !testing.Short() {
		maps.Copy(tests, long)
	}
	return tests
}

// deploymentTests stop or fill servers. Each runs on every topology, with its own deployment.
func deploymentTests() map[string]func(*testing.T, *programs, topology) {
	return map[string]func(*testing.T, *programs, topology){
		"agent-background": testAgentBackground, "apply": testApply,
		"backup": testBackup, "connection-files": testConnectionFiles, "connections": testConnections,
		"crash-points": testCrashPoints, "drain": testDrain, "drain-over": testDrainOver,
		"injections": testInjections, "ledger": testLedger, "live-sandboxes": testLiveSandboxes,
		"live-sandboxes-killed": testLiveSandboxesKilled, "live-storage": testLiveStorage,
		"network": testNetwork, "one-slot": testOneSlot,
		"sandbox-images": testSandboxImages, "secrets": testSecrets, "sleepers": testSleepers,
		"store": testStore, "thread-expiry": testThreadExpiry, "unfit": testUnfit,
		"volumes-killed": testVolumesKilled, "webhooks": testWebhooks, "webhooks-killed": testWebhooksKilled,
	}
}

// longDeploymentTests are deploymentTests that kill or restart processes many times.
func longDeploymentTests() map[string]func(*testing.T, *programs, topology) {
	return map[string]func(*testing.T, *programs, topology){
		"agent-session-ledger": testSessionLedger, "backup-ledger": testBackupLedger,
		"live-sandbox-lost": testLiveSandboxLost,
		"limits-killed":     testLimitsKilled, "rolling": testRolling,
		"threads-killed": testThreadsKilled, "unfit-at-start": testUnfitAtStart, "warm": testWarm,
	}
}

// singleTests deploy what they need: one topology, several gateways, another Redis.
func singleTests() map[string]func(*testing.T, *programs) {
	return map[string]func(*testing.T, *programs){
		"agent-anthropic":   testAgentAnthropic,
		"agent-programs":    testAgentPrograms,
		"agent-rolling":     testAgentRolling,
		"agent-responses":   testAgentResponses,
		"agent-session":     testAgentSession,
		"sandbox-agent":     testSandboxAgent,
		"audit":             testAudit,
		"autoscale-exec":    testAutoscaleExec,
		"autoscale-process": func(t *testing.T, p *programs) { testAutoscaleProcess(t, p, topology{}) },
		"batches":           testBatches, "counts": testCounts, "credentials": testCredentials, "data-lock": testDataLock,
		"disk-reserve":      testDiskReserve,
		"dispatcher-killed": func(t *testing.T, p *programs) { testDispatcherKilled(t, p, topology{separate: true}) },
		"docs":              testDocs, "drain-async": testDrainAsync, "foreign-image": testForeignImage, "golden": testGolden,
		"image": testImage, "init": testInit,
		"missing-language": testMissingLanguage, "names": testNames,
		"message-batches-expired": testMessageBatchesExpired, "message-batches-killed": testMessageBatchesKilled,
		"no-nsjail": testNoNsjail, "no-worker": testNoWorker, "org-deleted": testOrgDeleted,
		"output-budget": testOutputBudget, "rich": testRich, "people": testPeople, "pipelines": testPipelines,
		"quotas": testQuotas, "redis": testRedis, "sandbox-memory": testSandboxMemory,
		"schedule-without-sandbox": testScheduleWithoutSandbox,
		"sdk-go":                   testScenario,
		"schedules":                testSchedules, "schedules-killed": testSchedulesKilled, "server-lost": testServerLost,
		"three-gateways": testThreeGateways, "tracing": testTracing, "usage": testUsage, "worker-first": testWorkerFirst,
		"worker-frozen": testWorkerFrozen,
	}
}

// longSingleTests are further failures, tests under load, and tests on clusters.
func longSingleTests() map[string]func(*testing.T, *programs) {
	return map[string]func(*testing.T, *programs){
		"missing-workers": testMissingWorkers, "live-sandboxes-frozen": testLiveSandboxesFrozen,
		"acp-client": testACPClient, "acp-client-starts": testACPClientStarts,
		"agent-clients": testAgentClients, "agent-flood": testAgentFlood, "agent-load": testAgentLoad, "up": testUp,
		"autoscale-process-nats": func(t *testing.T, p *programs) { testAutoscaleProcess(t, p, topology{separate: true}) },
		"backup-ledger-cluster":  func(t *testing.T, p *programs) { testBackupLedger(t, p, onCluster()) },
		"coding-agents":          testCodingAgents, "coding-agents-hostile": testHostileRepository,
		"coding-agents-acp": testCodingAgentsACP, "coding-agents-many": testManyAgents,
		"coding-agents-network": testCodingAgentsNetwork,
		"clients":               testClients, "console": testConsole, "console-people": testConsolePeople,
		"cluster-leaders": testClusterLeaders, "cluster-nodes": testClusterNodes,
		"copies": testCopies, "costs": testCosts,
		"dispatcher-frozen":         testDispatcherFrozen,
		"e2b-clients":               testE2BClients,
		"sdk-python":                testSDKPython,
		"sdk-typescript":            testSDKTypeScript,
		"dispatcher-killed-cluster": func(t *testing.T, p *programs) { testDispatcherKilled(t, p, onCluster()) },
		"durable-writes":            testDurableWrites, "fresh-cluster": testFreshCluster,
		"history-postgres": testHistoryPostgres, "idle-streams": testIdleStreams, "mirror": testMirror,
		"ledger-cluster": func(t *testing.T, p *programs) { testLedger(t, p, onCluster()) },
		"no-faults":      testNoFaults, "overload": testOverload,
		"rolling-cluster": func(t *testing.T, p *programs) { testRolling(t, p, onCluster()) },
		"slow-reader":     testSlowReader, "stalled-readers": testStalledReaders, "thread-processes": testThreadProcesses,
		"thread-rebuild": testThreadRebuild,
		"threads-frozen": testThreadsFrozen, "threads-killed-directory": testThreadsKilledDirectory,
		"threads-store-fails": testThreadsStoreFails, "upgrade": testUpgrade, "workers-lost": testWorkersLost,
	}
}

// runShared runs the tests that can share a deployment because they leave it unchanged.
func runShared(t *testing.T, sys *system) {
	for name, test := range map[string]func(*testing.T, *api){
		"programs": testPrograms, "ways-to-die": testWaysToDie, "streaming": testStreaming, "eviction": testEviction,
		"async": testAsync, "delayed": testDelayed, "sse": testSSE, "record": testRecord, "cancel": testCancel,
		"terminate": testTerminate, "exact-output": testExactOutput, "exact-request": testExactRequest,
		"limits-of-output": testOutputLimit, "large": testLarge, "keys": testKeys, "free-plan": testFreePlan,
		"idempotency": testIdempotency, "idempotency-at-once": testIdempotencyAtOnce, "health": testHealth,
		"routes":   testRoutes,
		"big-body": testBigBody, "slow-headers": testSlowHeaders, "half-closed": testHalfClosed,
		"big-headers": testBigHeaders, "many-at-once": testManyAtOnce,
		"profile-limits": testProfileLimits,
		"thread-home":    testThreadHome, "thread-ends": testThreadEnds, "thread-modules": testThreadModules,
		"thread-program":       testThreadProgram,
		"thread-organisations": testThreadOrganisations, "thread-busy": testThreadBusy, "threads-at-once": testThreadsAtOnce,
		"thread-in-a-row": func(t *testing.T, a *api) { testThreadInARow(t, 30, a) }, "thread-limits": testThreadLimits,
		"runs-once":            testRunsOnce,
		"thread-upload-limits": testThreadUploadLimits, "thread-refused": testThreadRefused,
		"files-in-the-way": testFilesInTheWay,
		"volumes":          testVolumes, "file-uploads": testFileUploads, "file-changes": testFileChanges,
		"file-downloads": testFileDownloads, "signed-urls": testSignedURLs,
		"mcp": func(t *testing.T, a *api) { testMCP(t, sys.programs.bullpen, a) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, sys.in(t))
		})
	}
	t.Run("scripts", func(t *testing.T) { runScripts(t, sys, "script") })
}

// testApply has a deployment of its own, since it applies everything that it has exported.
func testApply(t *testing.T, p *programs, in topology) {
	runScripts(t, newSystem(t, p, in, 1), "apply")
}

// runScripts runs the scripts in a directory of testdata, in parallel.
func runScripts(t *testing.T, sys *system, dir string) {
	t.Helper()
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", dir),
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", sys.programs.dir+string(filepath.ListSeparator)+env.Getenv("PATH"))
			env.Setenv("BULLPEN_URL", sys.base)
			env.Setenv("BULLPEN_API_KEY", sys.key)
			env.Setenv("BULLPEN_NSJAIL", sys.programs.nsjail)
			env.Setenv("PROGRAMS", sys.programs.dir)
			return nil
		},
	})
}
