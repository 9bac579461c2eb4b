// Package thread stores the versions of threads' homes in a blob store. It lists, opens, archives
// and forks versions without restoring them, and never accesses a file system itself. Workers use
// it to store new layers and to read existing ones.
//
// A version is a chain of layers, see package layer. Its tree is built from the indexes of the
// layers; content is read on demand, by frame or object. Everything read is verified: a head
// contains the digests of a manifest and of indexes, an index contains those of frames and objects.
// The exceptions are a part of an object and a part of a staged file.
//
// # Keys
//
//	layers/<org>/<random>                            a layer
//	objects/<org>/<hex SHA-256>                      file content that is too large for a layer
//	threads/<org>/<thread>/<number, 10 digits>-<hex SHA-256>
//	                                                 a manifest; the key contains its digest, so that a
//	                                                 manifest found by listing can be verified
//	uploads/<org>/<random>                           a staged file
//	sweep/<org>/<hex SHA-256>-<random>               marks an object that is being removed
//	clock/<random>                                   reveals the store's time
//
// All keys but those of objects are used once.
//
// # Removal
//
// [Versions.Remove] replaces the head of a thread by a tombstone with one compare-and-set, then
// lists the thread's manifests, checks that the tombstone still exists, removes the listed
// manifests, and then the tombstone. No thread with the same id can be created while the tombstone
// exists. So the listed manifests belong to the removed thread, however late they are removed. Any
// process can complete a removal.
//
// # Garbage collection
//
// Heads and manifests refer to layers, uploads and manifests; layers refer to objects.
// [Versions.Collect] removes whatever is unreferenced and older than a safe age, which must exceed
// the time from a commit's first blob to its head. It never removes anything that is needed,
// whatever is written concurrently:
//
//   - New blobs are young. Only a fork adds a reference to an old layer or upload, by copying one,
//     or to an old manifest. An upload in parts may be dated from its first request; Collect reads
//     the heads again between listing old blobs and removing them.
//   - [Versions.Fork] writes its manifest and then checks that its source still refers to the
//     layers; it treats staged files and its head in the same way. Collect reads heads in the
//     order in which they changed, then manifests. If a source lost a reference before Collect
//     read it, the fork had its own by then, and Collect reads that later.
//   - An object can become referenced at any age, since its key depends on its content only.
//     [Versions.PutObject] puts it, which makes it young, waits until nothing marks it for
//     removal, checks that it exists, and otherwise starts again. Collect writes the mark, checks
//     that the object is old, removes it, then removes the mark. Whichever is first, the other one
//     notices it.
//   - A manifest that is the base of others is needed as long as they are. The base of a new
//     manifest is the manifest of the previous version or the base of that manifest. The head needs
//     both at that time.
//   - An edit refers to objects of the version before, in a new layer. The layers of that version, or
//     those that a compaction made of them, refer to the objects too, and remain in the head.
//   - A manifest whose number exceeds its head's may belong to a commit that is still to be
//     completed, and is retained.
//
// Two gaps remain. A request to remove an object may reach the store a minute late, or its process
// may sleep between checking and removing, and the object may have been put again in between. A
// reader of a thread that is removed, or of a version that leaves the history, may find it gone,
// which results in an error and never in wrong content.
package thread
