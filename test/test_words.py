"""Comments can be understood at once: checks docs/style.md's rules, as far as a program can. Needs only Python's
standard library.

A function's comment opens with a verb (VERBS), "Whether", "The number of" or a formula (`out (N) = ...`). No comment
has one of VAGUE's phrases, which make a reader look for their noun. docs/reading.md quotes what the sources have, where
it says, and docs/troubleshooting.md quotes what they print.

  test_words.py                 the test
  test_words.py --list FILE...  what is found in these files, a line each
  test_words.py --write-lines   brings the line numbers of docs/reading.md up to date
"""
import os
import re
import subprocess
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDERS = ["", "config", "formats", "kernels", "memory", "model", "optimizer", "run", "runtime", "zero"]
VERBS = set("""
Abandons Aborts Accepts Accumulates Adds Advances Advises Agrees Aligns Allocates Answers Appends Applies Asks Assigns Attaches Averages Begins Binds Blocks Bounds
Brings Broadcasts Builds Calls Cancels Caps Captures Casts Chains Changes Checks Chooses Claims Cleans Clears Closes Collects Combines Commits Compares Compiles Completes
Compresses Computes Connects Continues Converts Copies Corrects Counts Covers Creates Cuts Deals Decides Declares Decodes Decrements Deletes Demands Derives Describes Destroys
Detaches Divides Does Doubles Downloads Draws Drops Empties Enables Encodes Ends Enqueues Ensures Enters Escapes Estimates Evaluates Exchanges Executes Exits
Expands Extends Extracts Fails Falls Feeds Fetches Fills Filters Finds Finishes Fits Flushes Folds Follows Forgets Formats Frees Gathers Generates Gets Gives
Goes Grants Groups Guards Halts Handles Hands Has Hashes Holds Identifies Ignores Includes Increments Inserts Installs Inverts Issues Iterates Joins Judges Jumps Keeps
Learns Leaves Lets Limits Links Listens Lists Loads Locks Logs Looks Lowers Makes Maps Marks Masks Matches Measures Merges Modifies Moves Multiplies
Names Needs Normalizes Norms Notes Opens Orders Orthogonalizes Overwrites Packs Pads Parses Passes Pauses Picks Pins Places Plans Plays Points Polls Pops Posts Predicts
Prefetches Prepares Prints Proceeds Produces Promises Promotes Protects Proves Publishes Puts Quantizes Queries Queues Raises Ranks Reads Rebuilds Receives Records Recomputes
Reduces Refuses Registers Rejects Releases Removes Renames Reorders Repeats Replaces Replays Reports Requests Rescales Reserves Resets Resizes Resolves Restores Resumes Returns
Reverses Rotates Rounds Routes Runs Samples Saves Says Scales Scans Schedules Scores Searches Seeks Selects Sends Separates Serves Sets Shares Shifts
Shows Shuffles Signals Signs Skips Sleeps Smooths Sorts Spins Splits Spreads Squares Stacks Stages Starts Stops Stores Streams Subtracts Suggests Sums Swaps Switches
Synchronizes Takes Tells Terminates Tests Throws Ties Times Tokenizes Touches Tracks Trains Transfers Transforms Transposes Traverses Tries Trims Truncates Tunes Turns
Undoes Unlocks Unmaps Unpacks Unpins Updates Uploads Uses Validates Verifies Visits Waits Wakes Walks Warns Weights Widens Wraps Writes Zeroes
""".split())
FORMULA = re.compile(r"[\w*.,\[\]()<>&\-^ /+]{1,90}?\s(?:=|\+=|\*=|-=|<-|<=)\s")
VAGUE = re.compile(r"\b(?:(?:that|those|these) of|the ones?(?: before| after)|the same of|the same as before|alone)\b|^(?:Both|The same)\b", re.I)
GIVEN_UP = re.compile(r"\b(?:rehears\w*|(?:[A-Z0-9]+_)*MOST(?!_RECENT)(?:_[A-Z0-9]+)*|FP8_WHOLE)\b|(?:quantis|initialis|normalis|orthogonalis|utilis|colour|neighbour|behaviour)\w*")
PRONOUNS = re.compile(r"\b(?:it|its|that|this|those|these|they|them|their)\b", re.I)
FUNCTION = re.compile(r"(?:template <.*?>\s*(?=[a-zA-Z_]))?(?:__\w+__\s*(?:\(\(.*?\)\))?\s*)*(?:[A-Za-z_][\w<>,:&*\s]*?[\s*&])([a-z_]\w*)\((.*)", re.S)


def sources():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:  # a tree of no repository
        listed = [os.path.relpath(os.path.join(at, name), ROOT) for at, _, names in os.walk(ROOT) for name in names]
    return sorted(path for path in listed if path.endswith((".c", ".h", ".cu", ".cuh")) and (path.split("/")[0] if "/" in path else "") in FOLDERS)


def comments(text):
    """Yields (line, the comment's text, the function after it or None) of each comment. A comment at the end of a line
    of code has no function."""
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        stripped = lines[i].strip()
        if not stripped.startswith("//"):
            behind = re.search(r'(?<![:"])//\s?(.*)$', lines[i]) if lines[i].count('"') % 2 == 0 else None
            if behind and not stripped.startswith("#include"):
                yield i + 1, behind.group(1), None
            i += 1
            continue
        first = i
        while i < len(lines) and lines[i].strip().startswith("//"):
            i += 1
        words = " ".join(line.strip()[2:].strip() for line in lines[first:i])
        name = None
        if i < len(lines) and lines[first].startswith("//") and (lines[i][:1].isalpha() or lines[i][:2] == "__") and not re.match(
                r"(?:struct|union|enum)\s+\w+\s*[{;]|typedef|enum\s*\{|static_assert|extern|[A-Z_]+\(", lines[i]):
            code = "\n".join(lines[i:i + 12]).split("{")[0].split(";")[0]
            found = FUNCTION.match(code)
            if found and "=" not in re.sub(r"template <.*?>", "", code).split("(")[0]:
                name = found.group(1)
        yield first + 1, words, name


def faults(path, text):
    """Yields a line for whatever the rules forbid: words that docs/words.md gives up, and what comments may not do."""
    for word in GIVEN_UP.finditer(text):
        yield f"{path}:{text.count(chr(10), 0, word.start()) + 1}: {word.group()} is given up in docs/words.md"
    for line, words, function in comments(text):
        vague = VAGUE.search(words)
        if vague:
            yield f"{path}:{line}: '{vague.group()}' has no noun of its own, or 'only' is meant: {words[:100]}"
        words = re.sub(r"^-{3,}(?: .*? -{3,})?\s*", "", words)  # a heading
        if not function or not words:
            continue
        opening = words.split(" ")[0].rstrip(",.:;")
        if not ((opening in VERBS and words.split(" ")[1:2] != ["of"]) or opening == "Whether" or words.startswith("The number of") or FORMULA.match(words)):
            yield f"{path}:{line}: the comment of {function} opens with no verb, 'Whether' or 'The number of': {words[:100]}"
        if len(words.split()) < 50 and len(PRONOUNS.findall(words)) >= 5:
            yield f"{path}:{line}: five pronouns or more in the comment of {function}: {words[:100]}"


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


# ---- docs/reading.md ----

PAGE = "docs/reading.md"
HEADING = re.compile(r"\[([\w/.]+):(\d+)\]\(\.\./[\w/.]+\) `(\w+)`")


def line_of(path, function):
    """Returns the line at which a function's definition begins; 0 if the file has none."""
    lines = read(path).split("\n")
    for i, line in enumerate(lines):
        if re.match(r"[a-z].*\b%s\(" % function, line) and "{" in "".join(lines[i:i + 4]).split(";")[0]:
            return i + 1
    return 0


def quotes(path, excerpt):
    """Whether the file has the excerpt's lines, in which `...` stands for any lines."""
    parts = [" ".join(part.split()) for part in re.split(r"^\s*\.\.\.$", excerpt, flags=re.M)]
    text, at = " ".join(read(path).split()), 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def write_lines():
    text = HEADING.sub(lambda found: found.group().replace(":" + found.group(2), ":%d" % line_of(found.group(1), found.group(3))), read(PAGE))
    with open(os.path.join(ROOT, PAGE), "w", encoding="utf-8") as file:
        file.write(text)


class Reading(unittest.TestCase):
    def test_the_page_quotes_the_sources(self):
        sections = re.split(r"^## ", read(PAGE), flags=re.M)[1:]
        steps = [section for section in sections if HEADING.search(section.split("\n")[0])]
        self.assertEqual(len(steps), 10)
        for section in steps:
            path, line, function = HEADING.search(section).groups()
            self.assertEqual(int(line), line_of(path, function), f"{function}: test/test_words.py --write-lines")
            for excerpt in re.findall(r"^```c\n(.*?)^```$", section, re.M | re.S):
                self.assertTrue(quotes(path, excerpt), f"{path} does not have:\n{excerpt}")


class Troubleshooting(unittest.TestCase):
    def test_the_messages_are_the_programs(self):
        text = " ".join(re.sub(r'"\s*\n\s*"', "", read(path)) for path in sources())
        rows = re.findall(r"^- `([^`]+)`", read("docs/troubleshooting.md"), re.M)
        self.assertGreater(len(rows), 10)
        for message in rows:
            self.assertIn(message, text)


# ---- comments ----

class Words(unittest.TestCase):
    def test_comments_can_be_understood_at_once(self):
        found = []
        for path in sources():
            found += faults(path, read(path))
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_faults_are_found(self):
        for text in ("// Counts of a plan.\nstatic int plan_counts(void) {", "// The bytes of a plan.\nstatic int plan_bytes(void) {", "// Adds that of the layer.\nint add(int a) {", "// Returns a.\nint a; // of this layer alone",
                     "// Both wait.\nvoid wait(void);", "// Returns it where that is this, and its own where they are those.\nint get(void);"):
            self.assertNotEqual(list(faults("x.c", text)), [], text)
        self.assertEqual(len(list(faults("x.c", "enum { LINES_MOST = 3, FP8_AMAX_MOST_RECENT }; // quantised"))), 2)
        for text in ("// Whether a plan fits.\nstatic bool fits(void) {", "// out (N) = in + 1.\nvoid add(float *out);", "// The number of tokens.\nint tokens(void);",
                     "// A plan.\nstruct plan {", "// Adds the layer's bytes.\nint add(int a) {"):
            self.assertEqual(list(faults("x.c", text)), [], text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--list"]:
        for name in sys.argv[2:]:
            print("\n".join(faults(name, read(name))))
    elif sys.argv[1:2] == ["--write-lines"]:
        write_lines()
    else:
        unittest.main()
