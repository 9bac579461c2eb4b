// Package e2e tests the built program: with real jails, over real HTTP, all in one process and as
// separate processes.
//
// # Running
//
// As root, after `make build`:
//
//	go test -short -run '^TestE2E$/^one-process$/^drain$' ./e2e
//
// With -short the long variants are skipped, and tests that run on each topology run on separate
// processes only. `make test` sets it, `make test-all` does not.
//
// # Writing a test
//
// A test is a function that is listed in one of the tables in e2e_test.go. Choose the first one
// that fits:
//
//   - runShared: a test that leaves a deployment as it was. It gets an [api], a client of a deployment
//     that it shares with concurrent tests, so it may count only what it made itself.
//   - deploymentTests: a test that stops, fills or kills servers. It starts its own deployment with
//     newSystem.
//   - longDeploymentTests: a deploymentTest that kills or restarts processes many times. It is skipped
//     with -short.
//   - singleTests: a test that makes sense on one topology, or needs one that no other test has.
//   - longSingleTests: the same on a cluster, under load, or for longer than half a minute. It is
//     skipped with -short.
//
// A short one:
//
//	func testGreeting(t *testing.T, p *programs, in topology) {
//		sys := newSystem(t, p, in, 1)                    // 1 slot; ready when newSystem returns
//		id := sys.submit(bash("echo hello; sleep 1"))    // asynchronous
//		sys.ended(id).succeeded(t, "hello\n")
//		sys.worker.kill()                                // processes are under the test's control
//		sys.startWorker(t)
//	}
//
// # Rules
//
//   - Wait for events, never for time: ended, eventually, and the channels of receivers wait up to
//     patience. A busy machine must not fail a test, so prefer submit and ended to inline, which the
//     server rejects after --queue-wait without a free slot.
//   - A program that must run until the test ends it uses newHold.
//   - A time that the server waits for is a setting. Set it low in the test; do not sleep through it.
//   - A count that a long run raises is a repeatsFlag, with a small number for -short.
//   - Do not branch on the topology. The same test runs on each and checks topology.separate only
//     where a process is killed.
//   - A process that must die between two durable steps is built with crash points, see programs.faulty
//     and package fault.
//   - Every abuse test of the control plane is in controlAttacks, so that it appears in docs/reference/attacks.md.
package e2e
