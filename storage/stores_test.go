package storage_test

const childDir = "BULLPEN_TEST_STORE"

func putForEver(string) {}
