"""The corpora of the fuzz targets are what test/fuzz/make_corpus.py makes. Needs only Python's standard library."""
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from environment import ROOT

FUZZ = os.path.join(ROOT, "test/fuzz")


class Corpus(unittest.TestCase):
    def test_files_are_those_that_the_script_writes(self):
        """A file that was edited by hand would be lost at the next run of the script."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(FUZZ + "/make_corpus.py", folder)
            subprocess.run([sys.executable, folder + "/make_corpus.py"], check=True, timeout=60)
            made = sorted(name for name in os.listdir(folder + "/corpus") if not name.endswith(".expected"))
            self.assertGreaterEqual(len(made), 10)
            for name in made:
                ours, theirs = (f"{parent}/corpus/{name}" for parent in (FUZZ, folder))
                files = sorted(os.listdir(theirs))
                self.assertEqual(sorted(os.listdir(ours)), files)
                self.assertEqual(filecmp.cmpfiles(ours, theirs, files, shallow=False), (files, [], []))
                self.assertTrue(filecmp.cmp(ours + ".expected", theirs + ".expected", shallow=False), name)


if __name__ == "__main__":
    unittest.main()
