// Package files has the routes of files and threads: lists and changes of files, signed URLs to download
// and upload them, uploads in parts, and the versions of threads.
package files
