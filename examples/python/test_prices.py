import unittest

from prices import gross


class GrossTest(unittest.TestCase):
    def test_rounds(self):
        self.assertEqual(gross(1050, 19), 1250)

    def test_without_tax(self):
        self.assertEqual(gross(999, 0), 999)

    def test_negative(self):
        with self.assertRaises(ValueError):
            gross(-1, 19)
