//! One concept, one word: the glossary in ARCHITECTURE.md says which words are dead, and this test rejects them.
//!
//! A dead word is rejected where it is a name: part of an identifier, a file's name, a flag. Ordinary English in
//! comments stays. A dead phrase is rejected everywhere.

use std::fs;
use std::path::{Path, PathBuf};

/// Words that no identifier and no file name contains.
const DEAD_WORDS: &[&str] = &[
    "told",
    "tell",
    "tells",
    "telling",
    "trouble",
    "troubles",
    "sight",
    "fate",
    "fates",
    "seat",
    "seats",
    "seated",
    "elude",
    "eludes",
    "divide",
    "divides",
    "divided",
    "dividing",
    "divider",
    "division",
    "divisions",
    "undivided",
    "doubling",
    "doublings",
    "revive",
    "revives",
    "revived",
    "books",
    "learn",
    "learnt",
];

/// Names of types, and of files, that say something else today.
const DEAD_NAMES: &[&str] = &[
    "Answer",
    "Asking",
    "Calling",
    "Fetching",
    "Keeping",
    "Known",
    "Part",
    "Parts",
    "Passing",
    "is_passing",
    "Waiting",
    "When",
    "account.rs",
    "accounts.rs",
    "floor.rs",
    "known.rs",
    "parts.rs",
];

/// Sentences are written with other words, in code and documents alike.
const DEAD_PHRASES: &[&str] = &[
    "put together",
    "puts together",
    "putting together",
    "bring back",
    "brings back",
    "brought back",
    "take away",
    "takes away",
    "taken away",
    "behind somebody's back",
    "nobody is there to",
    "worth retrying",
    // A rate is not a quota: a full bucket admits up to twice as many within that time.
    "calls a day",
    "requests a day",
    "runs a day",
    " tokens a day",
    "item of a bucket",
    "part of a bucket",
    "parts of a bucket",
    "part of the bucket",
    "parts of the bucket",
];

/// Files that are about the words themselves.
const ALLOWED: &[&str] = &["tests/tidy.rs", "ARCHITECTURE.md", "CHANGELOG.md"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    Text,
}

/// A source split into code, comments and string literals.
fn pieces(source: &str) -> Vec<(Kind, &str)> {
    let mut pieces = Vec::new();
    let (mut start, mut at) = (0, 0);
    let bytes = source.as_bytes();
    while at < bytes.len() {
        let rest = &source[at..];
        let (kind, length) = match bytes[at] {
            b'/' if rest.starts_with("//") => {
                (Kind::Comment, rest.find('\n').unwrap_or(rest.len()))
            }
            b'/' if rest.starts_with("/*") => {
                (Kind::Comment, rest.find("*/").map_or(rest.len(), |end| end + 2))
            }
            b'r' if rest.starts_with("r\"") || rest.starts_with("r#") => {
                let hashes = rest[1..].bytes().take_while(|byte| *byte == b'#').count();
                let opening = 2 + hashes;
                let closing = format!("\"{}", "#".repeat(hashes));
                match rest.get(opening - 1..opening) {
                    Some("\"") => {
                        let end = rest[opening..].find(&closing);
                        (Kind::Text, end.map_or(rest.len(), |end| opening + end + closing.len()))
                    }
                    _ => {
                        at += 1;
                        continue;
                    }
                }
            }
            b'"' => (Kind::Text, text_length(rest)),
            b'\'' => match char_length(rest) {
                Some(length) => (Kind::Text, length),
                None => {
                    at += 1;
                    continue;
                }
            },
            _ => {
                at += 1;
                continue;
            }
        };
        pieces.push((Kind::Code, &source[start..at]));
        pieces.push((kind, &source[at..at + length]));
        at += length;
        start = at;
    }
    pieces.push((Kind::Code, &source[start..]));
    pieces
}

/// The comments of a source, those of adjacent lines as one text.
fn comments(pieces: &[(Kind, &str)]) -> Vec<String> {
    let mut comments = vec![String::new()];
    for (kind, piece) in pieces {
        match kind {
            Kind::Comment => {
                let last = comments.last_mut().expect("never empty");
                last.push(' ');
                last.push_str(piece.trim_start_matches(['/', '!', '*']));
            }
            Kind::Code if piece.trim().is_empty() => {}
            Kind::Code | Kind::Text => comments.push(String::new()),
        }
    }
    comments
}

fn text_length(rest: &str) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// The length of a character literal; `None` for a lifetime.
fn char_length(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix('\'')?;
    if inner.starts_with('\\') {
        return inner[2..].find('\'').map(|end| end + 4);
    }
    let first = inner.chars().next()?;
    inner[first.len_utf8()..].starts_with('\'').then(|| 2 + first.len_utf8())
}

/// The words of an identifier: `bucketPart`, `part_of` and `PARTS_MAX` all have one.
fn words_of(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in identifier.chars() {
        if c == '_' || (c.is_uppercase() && was_lower) {
            words.push(String::new());
        }
        if c != '_' {
            words.last_mut().expect("never empty").extend(c.to_lowercase());
        }
        was_lower = c.is_lowercase();
    }
    words
}

fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// What is wrong with one file.
fn violations(path: &str, source: &str) -> Vec<String> {
    let name = path.rsplit('/').next().unwrap_or(path);
    if ALLOWED.iter().any(|file| path.ends_with(file)) {
        return Vec::new();
    }
    let mut found = Vec::new();
    let stem = name.split('.').next().unwrap_or(name).replace('-', "_");
    if DEAD_NAMES.contains(&name) || words_of(&stem).iter().any(|w| DEAD_WORDS.contains(&&**w)) {
        found.push(format!("{path}: the file's name is a dead word"));
    }
    let is_rust = name.ends_with(".rs");
    let pieces = if is_rust { pieces(source) } else { vec![(Kind::Comment, source)] };
    let is_text = |(kind, _): &&(Kind, &str)| *kind == Kind::Text;
    let texts = pieces.iter().filter(is_text).map(|(_, text)| text.replace("\\\n", " "));
    for sentence in comments(&pieces).into_iter().chain(texts) {
        let flat = sentence.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
        for phrase in DEAD_PHRASES.iter().filter(|phrase| flat.contains(**phrase)) {
            let at = flat.find(phrase).unwrap_or(0);
            let around: String = flat[at..].chars().take(60).collect();
            found.push(format!("{path}: {phrase:?} in {around:?}"));
        }
    }
    for (kind, piece) in pieces {
        if kind == Kind::Code {
            for identifier in identifiers(piece) {
                let dead = words_of(identifier).into_iter().find(|w| DEAD_WORDS.contains(&&**w));
                if let Some(word) = dead {
                    found.push(format!("{path}: {word:?} in the name {identifier}"));
                } else if DEAD_NAMES.contains(&identifier) {
                    found.push(format!("{path}: the name {identifier}"));
                }
            }
        }
    }
    found
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All sources and documents of the workspace.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the workspace").flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if path.is_dir() {
            let is_ours = !name.starts_with('.') && name != "target" && name != "corpus";
            if is_ours {
                files(&path, found);
            }
        } else if name.ends_with(".rs") || name.ends_with(".md") || name.ends_with(".snap") {
            found.push(path);
        }
    }
}

#[test]
fn no_dead_word_is_in_use() {
    let root = root();
    if !root.join("ARCHITECTURE.md").exists() {
        // A package by itself, without the workspace around it.
        return;
    }
    let mut all = Vec::new();
    files(&root, &mut all);
    assert!(all.len() > 400, "only {} files were found", all.len());
    let mut wrong = Vec::new();
    for path in all {
        let source = fs::read_to_string(&path).expect("text");
        let path = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
        wrong.extend(violations(&path, &source));
    }
    assert!(wrong.is_empty(), "{} dead words:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_planted_dead_word_is_found() {
    for (path, source) in [
        ("src/a.rs", "fn tell_others() {}"),
        ("src/a.rs", "struct BucketFate;"),
        ("src/a.rs", "let isDivided = 1;"),
        ("src/a.rs", "const DOUBLINGS_MAX: u8 = 1;"),
        ("src/a.rs", "enum When { A }"),
        ("src/a.rs", "/// Shards that were put\n/// together again.\nfn a() {}"),
        ("src/a.rs", "let text = \"Take away a stack\";"),
        ("src/books.rs", ""),
        ("src/floor.rs", ""),
        ("docs/a.md", "A part of a bucket is an item."),
        ("tests/snapshots/a__told_twice.snap", ""),
    ] {
        assert_ne!(violations(path, source), [""; 0], "{path}: {source}");
    }
    for (path, source) in [
        ("src/a.rs", "// When it is told to divide, tell nobody. Part of the write.\nfn part() {}"),
        ("src/a.rs", "let text = \"so many times doubled\"; let c = '\"'; let seat_less = 1;"),
        ("src/a.rs", "fn when<'a>(partition: &'a str, known: bool) {}"),
        ("docs/a.md", "When the store answers, tell the caller."),
    ] {
        let expected = usize::from(source.contains("seat_less"));
        assert_eq!(violations(path, source).len(), expected, "{source}");
    }
}
