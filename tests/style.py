#!/usr/bin/env python3
"""The style checks that a text shows: lengths, chapters of mptrain.h, words that must not stay.

One line a check: "ok style: NAME" or "FAIL style: NAME: where: what; ...".  Part of tests/style.sh.
"""
import os
import re
import statistics
import subprocess
import sys

HEADER = 'mptrain.h'
MAX_COLUMNS = 100
MAX_LINES = {'mptrain.h': 19000, 'kernels.cu': 5000, 'README.md': 150}
MAX_FUNCTION_LINES = 120
MAX_MEDIAN_FUNCTION_LINES = 20
# What a reader can take in at a sitting, times what the chapter has to hold.
CHAPTER_BUDGETS = {'storage': 1300, 'tfrecord': 1300, 'example': 1300, 'image': 1300,
                   'dataset': 1300, 'loader': 1300, 'position': 1300, 'cpu': 2200, 'cuda': 1000,
                   'comm': 1000, 'layers': 1000, 'model': 1000, 'train': 1000,
                   'evaluate': 1000, 'device': 1000, 'safetensors': 1000, 'state': 1000}
FRAME = ['Problem', 'Idea', 'Shapes', 'Tested', 'Next']
FRAME_WITHIN = 20  # lines of the heading

CODE = ('.c', '.h', '.cu', '.cuh', '.py', '.sh')
# Spelled so that this file does not find itself.
UNFINISHED = re.compile(r'(?<![A-Za-z])(TO' r'DO|FIX' r'ME|XX' r'X)(?![A-Za-z])')
PRIVATE_PATH = re.compile(r'/wor' r'k/')


def verdict(name, complaints):
    """Prints the line of one check and returns whether it passed."""
    if not complaints:
        print(f'ok style: {name}')
        return True
    more = f'; and {len(complaints) - 12} more' if len(complaints) > 12 else ''
    print(f'FAIL style: {name}: ' + '; '.join(complaints[:12]) + more)
    return False


def project_files():
    """Tracked files and new ones that git does not ignore; without git, all but the build."""
    listing = None
    if os.path.exists('.git'):  # a directory, or the file of a linked checkout
        listing = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard'],
                                 capture_output=True, text=True, check=False)
    if listing and listing.returncode == 0:
        names = listing.stdout.splitlines()
    else:
        names = [os.path.relpath(os.path.join(top, name))
                 for top, _, found in os.walk('.') for name in found]
        names = [n for n in names if not n.startswith(('build/', 'output/', '.git/'))]
    return sorted(n for n in names if os.path.isfile(n) and not n.startswith('tests/data/'))


def read_lines(name):
    """The lines of a text file, or None for a binary one."""
    with open(name, 'rb') as file:
        content = file.read()
    if b'\0' in content:
        return None
    return content.decode('utf-8', errors='replace').split('\n')


def check_texts(texts):
    wide, tabs, blanks, words, paths = [], [], [], [], []
    for name, lines in texts.items():
        code = name.endswith(CODE)
        for number, line in enumerate(lines, 1):
            where = f'{name}:{number}'
            if code and len(line) > MAX_COLUMNS:
                wide.append(f'{where} has {len(line)}')
            if code and '\t' in line:
                tabs.append(where)
            if line != line.rstrip():
                blanks.append(where)
            if UNFINISHED.search(line):
                words.append(where)
            if PRIVATE_PATH.search(line):
                paths.append(where)
    return [verdict(f'at most {MAX_COLUMNS} columns', wide),
            verdict('no tabs', tabs),
            verdict('no trailing blanks', blanks),
            verdict('no marks of unfinished work', words),
            verdict("no paths of one machine", paths)]


def check_file_lengths(texts):
    return [verdict(f'{name} has at most {limit:,} lines',
                    [f'it has {len(texts[name]) - 1:,}'] if len(texts[name]) - 1 > limit else [])
            for name, limit in MAX_LINES.items() if name in texts]


# ---- functions -----------------------------------------------------------------------------------

def blank_out(text):
    """The text with comments, literals and preprocessor lines turned into blanks, lines kept."""
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    text = pattern.sub(lambda m: re.sub(r'[^\n]', ' ', m.group()), text)
    directive = re.compile(r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.M)
    return directive.sub(lambda m: re.sub(r'[^\n]', ' ', m.group()), text)


def functions(text):
    """(name, first line, number of lines) of each function body, found by counting braces.

    A brace that opens at depth 0 behind a closing parenthesis opens a function. extern "C" braces
    do not count. Raises ValueError if the braces do not pair."""
    text = blank_out(text)
    text = re.sub(r'(extern\s+)\{', r'\1 ', text)  # its literal is blank by now; its end: below
    found, depth, begun, name = [], 0, 0, ''
    statement = 0  # where the text at depth 0 that is not yet ended by ; or } begins
    for brace in re.finditer(r'[{};]', text):
        at, sign = brace.start(), brace.group()
        if sign == '{':
            if depth == 0:
                head = text[statement:at]
                called = re.findall(r'(\w+)\s*\(', re.sub(r'__attribute__\s*\(\(.*?\)\)', '', head))
                name = called[0] if called and head.rstrip().endswith(')') else ''
                begun = statement + len(head) - len(head.lstrip())
            depth += 1
        elif sign == '}':
            if depth == 0:
                statement = at + 1  # the end of an extern "C" block
                continue
            depth -= 1
            if depth == 0 and name:
                first = text.count('\n', 0, begun) + 1
                found.append((name, first, text.count('\n', 0, at) + 2 - first))
        if depth == 0:
            statement = at + 1
    if depth:
        raise ValueError('braces do not pair')
    return found


def check_functions(texts):
    complaints, lengths = [], []
    for name in sorted(texts):
        if not name.endswith(('.c', '.h', '.cu')):
            continue
        try:
            found = functions('\n'.join(texts[name]))
        except ValueError as error:
            complaints.append(f'{name}: {error}')
            continue
        complaints += [f'{name}:{line} {function} has {length}'
                       for function, line, length in found if length > MAX_FUNCTION_LINES]
        if name == HEADER:
            lengths = [length for _, _, length in found]
    median = statistics.median(lengths) if lengths else 0
    return [verdict(f'functions have at most {MAX_FUNCTION_LINES} lines', complaints),
            verdict(f'the median of the {len(lengths)} functions of {HEADER} is at most '
                    f'{MAX_MEDIAN_FUNCTION_LINES} lines',
                    [] if 0 < median <= MAX_MEDIAN_FUNCTION_LINES else [f'{median:g} lines'])]


# ---- chapters ------------------------------------------------------------------------------------

def headings(lines):
    """(tag, title, index) of each chapter: a tag line between two rules."""
    found = []
    for i in range(1, len(lines) - 1):
        tag = re.match(r' \* >>([a-z0-9-]+)\s*(.*)', lines[i])
        ruled = re.match(r'[/ ]\* ={20}', lines[i - 1]) and re.match(r' \* ={20}', lines[i + 1])
        if tag and ruled:
            found.append((tag.group(1), tag.group(2), i))
    return found


def contents(lines, chapters):
    """The tags of the table of contents, which stands in chapter toc."""
    begin = [i for tag, _, i in chapters if tag == 'toc']
    end = [i for tag, _, i in chapters if tag == 'read']
    if not begin or not end:
        return None
    entries = (re.match(r' \*  +>>([a-z0-9-]+)\s', line) for line in lines[begin[0] + 1:end[0]])
    return [entry.group(1) for entry in entries if entry]


def check_contents(lines, chapters):
    listed = contents(lines, chapters)
    if listed is None:
        return verdict('table of contents', [f'{HEADER}: no chapters >>toc and >>read'])
    there = [tag for tag, _, _ in chapters]
    complaints = [f'>>{tag} is listed, but no chapter' for tag in listed if tag not in there]
    # The contents need not list themselves, nor what stands before them.
    before = there[:there.index('toc') + 1]
    complaints += [f'{HEADER}:{i + 1} >>{tag} is a chapter, but not listed'
                   for tag, _, i in chapters if tag not in listed and tag not in before]
    complaints += [f'>>{tag} is the tag of two chapters' for tag in sorted(set(there))
                   if there.count(tag) > 1]
    complaints += [f'>>{tag} is listed twice' for tag in sorted(set(listed))
                   if listed.count(tag) > 1]
    if not complaints and listed != [tag for tag in there if tag in listed]:
        complaints.append('the order differs: listed ' + ' '.join(listed) + ', chapters ' +
                          ' '.join(there))
    return verdict('table of contents and chapter tags agree', complaints)


def check_chapters(lines):
    chapters = headings(lines)
    passed = [check_contents(lines, chapters)]
    ends = [i for _, _, i in chapters[1:]] + [len(lines)]
    over = [f'>>{tag} has {end - i:,} lines, more than {CHAPTER_BUDGETS[tag]:,}'
            for (tag, _, i), end in zip(chapters, ends)
            if end - i > CHAPTER_BUDGETS.get(tag, len(lines))]
    passed.append(verdict('chapters keep to their budgets', over))
    unframed = []
    for tag, title, i in chapters:
        if not title[:1].isdigit():  # only the chapters of the implementation are numbered
            continue
        words = [m.group(1) for m in (re.match(r' \* (\w+):', line)
                                      for line in lines[i:i + FRAME_WITHIN]) if m]
        missing = [word for word in FRAME if word not in words]
        if missing:
            unframed.append(f'{HEADER}:{i + 1} >>{tag} lacks ' + ', '.join(missing))
        elif [word for word in words if word in FRAME] != FRAME:
            unframed.append(f'{HEADER}:{i + 1} >>{tag} has its frame in another order')
    passed.append(verdict('numbered chapters open with ' + ', '.join(FRAME), unframed))
    return passed


def main():
    texts = {name: lines for name in project_files() if (lines := read_lines(name)) is not None}
    passed = check_texts(texts) + check_file_lengths(texts) + check_functions(texts)
    if HEADER in texts:
        passed += check_chapters(texts[HEADER])
    return not all(passed)


if __name__ == '__main__':
    sys.exit(main())
