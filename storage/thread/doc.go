// Package thread keeps the versions of threads' homes in a blob store and reads them there: what is in a home is listed, opened, exported
// and forked without making the home, and nothing here touches a file system.
//
// A version is a chain of layers (see package layer). Its tree is made by merging the layers' indexes, as home.Apply makes a
// directory of them; content is read from the store when it is asked for, by the frames or the object that have it. Everything that is
// read is verified: a head names the digest of a manifest and of indexes, an index those of frames and objects. Only a part of an object
// that is not the whole of it, and a part of a staged file, are as the store gives them.
//
// # Keys
//
//	layers/<org>/<random>                            a layer
//	objects/<org>/<hex SHA-256>                      the content of a file that is too large for a layer
//	threads/<org>/<thread>/<number, 10 digits>-<hex SHA-256>
//	                                                 a manifest: its own digest is in its key, so that one that was found by
//	                                                 a list can be verified
//	uploads/<org>/<random>                           a staged file
//	sweep/<org>/<hex SHA-256>-<random>               says that an object is being removed
//	clock/<random>                                   tells the time of the store
//
// All but objects have keys that are used once.
//
// # Removal of what nothing refers to
//
// A blob is referred to by heads and by manifests; an object by layers that these name. [Versions.Collect] removes what nothing refers to
// and what is older than a safe age, which is more than a commit takes from its first blob to its head. Why nothing is removed that is
// needed, whatever is written meanwhile:
//
//   - New blobs are young. A layer, a manifest or an upload that is old gets no new reference but by a fork, which copies one.
//   - [Versions.Fork] writes its manifest and then looks whether its source still has the layers, and for staged files does the same with
//     its head. Collect reads heads in the order in which they change, and then manifests: what a source had lost before it was
//     read, a fork had by then, and that is read later.
//   - An object may get a reference at any age, since its key is its content's. [Versions.PutObject] puts it, which makes it young, then
//     waits until there is no mark of its removal, then sees that it is there, and otherwise begins again. Collect writes the mark, then
//     sees that the object is old, then removes it, and then the mark. Whichever comes first, the other one sees it.
//   - A manifest that others go on from is needed as long as these are. A new one goes on only from that of the version before it, or from
//     what that one goes on from, which are needed by the head at that time.
//   - A manifest with a number over its head's may be of a commit that will be rolled forward, and is kept.
//
// What is left: a request to remove an object that reaches the store a minute after it was sent, or was sent by a process that slept so
// long between two lines, can remove one that was put again meanwhile. And whoever reads a thread that is removed, or a version while it
// falls out of the history, may find that the store has it no longer, which is an error and never wrong content.
package thread
