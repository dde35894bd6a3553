//! A Markdown page with a generated block for each section.
//!
//! A block stands between two lines, `<!-- begin: NAME -->` and `<!-- end: NAME -->`. Everything else
//! on the page is written by hand and stays as it is.

use std::path::{Path, PathBuf};

use crate::arguments::Section;

pub struct Page {
    file: PathBuf,
}

impl Page {
    /// Checks that the page has a block for each section.
    pub fn open(file: &Path, sections: &[Section]) -> Result<Self, String> {
        let page = Self { file: file.to_owned() };
        let text = page.read()?;
        for section in sections {
            page.checked(replace_block(&text, section.name(), ""))?;
        }
        Ok(page)
    }

    /// Replaces the block of a section.
    pub fn replace(&self, section: Section, content: &str) -> Result<(), String> {
        // Read again: other sections have been written, or the page was edited meanwhile.
        let text = self.checked(replace_block(&self.read()?, section.name(), content))?;
        let written = std::fs::write(&self.file, text);
        written.map_err(|error| format!("could not write {}: {error}", self.file.display()))
    }

    fn read(&self) -> Result<String, String> {
        let text = std::fs::read_to_string(&self.file);
        text.map_err(|error| format!("could not read {}: {error}", self.file.display()))
    }

    fn checked(&self, replaced: Result<String, String>) -> Result<String, String> {
        replaced.map_err(|problem| format!("{}: {problem}", self.file.display()))
    }
}

/// The page with new content in one block.
fn replace_block(page: &str, name: &str, content: &str) -> Result<String, String> {
    let begin = format!("<!-- begin: {name} -->");
    let end = format!("<!-- end: {name} -->");
    let (begin_start, begin_end) = only_line(page, &begin)?;
    let (end_start, _) = only_line(page, &end)?;
    if end_start < begin_start {
        return Err(format!("`{end}` comes before `{begin}`"));
    }
    let (before, after) = (&page[..begin_end], &page[end_start..]);
    Ok(format!("{before}\n{}\n\n{after}", content.trim_end()))
}

/// Where the only line with this text starts and ends, in bytes; the end includes the line break.
fn only_line(page: &str, wanted: &str) -> Result<(usize, usize), String> {
    let mut found = None;
    let mut start = 0;
    for line in page.split_inclusive('\n') {
        let end = start + line.len();
        if line.trim_end() == wanted && found.replace((start, end)).is_some() {
            return Err(format!("there is more than one line `{wanted}`"));
        }
        start = end;
    }
    found.ok_or_else(|| format!("there is no line `{wanted}`; add it where the block belongs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# Title

By hand: `<!-- begin: memory -->` within a line is no marker.

<!-- begin: memory -->

old

<!-- end: memory -->

Between.

<!-- begin: sqlite -->
<!-- end: sqlite -->

The end, without a line break";

    #[test]
    fn only_the_named_block_changes() {
        let page = replace_block(PAGE, "memory", "| new |\n| --- |\n").unwrap();
        assert_eq!(page, PAGE.replace("\nold\n\n", "\n| new |\n| --- |\n\n"));
        let both = replace_block(&page, "sqlite", "figures").unwrap();
        assert!(both.starts_with(page.split("<!-- end: sqlite").next().unwrap()));
        assert!(both.ends_with(
            "<!-- begin: sqlite -->\n\nfigures\n\n<!-- end: sqlite -->\n\n\
             The end, without a line break"
        ));
    }

    #[test]
    fn replacing_a_block_again_changes_nothing_else() {
        let once = replace_block(PAGE, "memory", "new").unwrap();
        assert_eq!(replace_block(&once, "memory", "new").unwrap(), once);
        let back = replace_block(&once, "memory", "old").unwrap();
        assert_eq!(back, PAGE);
    }

    #[test]
    fn a_missing_doubled_or_reversed_marker_is_an_error() {
        let problem = |page: &str, name: &str| replace_block(page, name, "new").unwrap_err();
        assert!(problem(PAGE, "scale").contains("there is no line `<!-- begin: scale -->`"));
        assert!(problem("<!-- begin: a -->\n", "a").contains("`<!-- end: a -->`"));
        let doubled = format!("{PAGE}\n<!-- end: memory -->\n");
        assert!(problem(&doubled, "memory").contains("more than one"));
        assert!(problem("<!-- end: a -->\n<!-- begin: a -->\n", "a").contains("comes before"));
    }

    #[test]
    fn a_page_without_a_block_fails_before_measuring() {
        let file = std::env::temp_dir().join(format!("zae-bench-page-{}.md", std::process::id()));
        std::fs::write(&file, PAGE).unwrap();
        let page = Page::open(&file, &[Section::Memory, Section::Sqlite]).unwrap();
        let missing = Page::open(&file, &[Section::Memory, Section::Dynamodb]).err().unwrap();
        assert!(missing.contains("<!-- begin: dynamodb -->"), "{missing}");
        page.replace(Section::Sqlite, "figures").unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text, replace_block(PAGE, "sqlite", "figures").unwrap());
        std::fs::remove_file(&file).unwrap();
        assert!(page.replace(Section::Sqlite, "").unwrap_err().contains("could not read"));
    }
}
