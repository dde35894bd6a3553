//! The command line.

use std::path::PathBuf;
use std::time::Duration;

const USAGE: &str =
    "use [memory] [sqlite] [scale] [aggregator] [dynamodb] [--seconds N] [--write FILE]";

/// A part of the report, with its own block in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    Memory,
    Sqlite,
    Scale,
    Aggregator,
    Dynamodb,
}

impl Section {
    const ALL: [Self; 5] =
        [Self::Memory, Self::Sqlite, Self::Scale, Self::Aggregator, Self::Dynamodb];

    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::Scale => "scale",
            Self::Aggregator => "aggregator",
            Self::Dynamodb => "dynamodb",
        }
    }
}

#[derive(Debug, PartialEq)]
pub struct Arguments {
    pub sections: Vec<Section>,
    /// The time for each figure of the section dynamodb.
    pub seconds: Duration,
    /// The page whose blocks are replaced.
    pub write: Option<PathBuf>,
}

impl Arguments {
    pub fn parse(words: &[String]) -> Result<Self, String> {
        let mut arguments =
            Self { sections: Vec::new(), seconds: Duration::from_secs(3), write: None };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let section = Section::ALL.into_iter().find(|section| section.name() == word);
            match (section, word.as_str()) {
                (Some(section), _) => arguments.sections.push(section),
                (None, "--seconds") => {
                    let seconds = words.next().and_then(|word| word.parse().ok());
                    let seconds = seconds.filter(|seconds| (0.1..=3_600.0).contains(seconds));
                    let seconds = seconds.ok_or("--seconds needs a number from 0.1 to 3600")?;
                    arguments.seconds = Duration::from_secs_f64(seconds);
                }
                (None, "--write") => {
                    arguments.write = Some(words.next().ok_or("--write needs a file")?.into());
                }
                (None, other) => return Err(format!("unknown argument {other:?}; {USAGE}")),
            }
        }
        if arguments.sections.is_empty() {
            // Without the one that needs another program.
            let all = Section::ALL.into_iter().filter(|section| *section != Section::Dynamodb);
            arguments.sections = all.collect();
        }
        Ok(arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Arguments::parse(&words)
    }

    #[test]
    fn without_a_section_all_but_dynamodb_are_measured() {
        use Section::{Aggregator, Memory, Scale, Sqlite};
        let arguments = parse("--write docs/benchmarks.md").unwrap();
        assert_eq!(arguments.sections, [Memory, Sqlite, Scale, Aggregator]);
        assert_eq!(arguments.write, Some("docs/benchmarks.md".into()));
        assert_eq!(parse("sqlite memory").unwrap().sections, [Sqlite, Memory]);
    }

    #[test]
    fn wrong_arguments_are_errors() {
        assert_eq!(parse("dynamodb --seconds 0.5").unwrap().seconds, Duration::from_millis(500));
        for line in ["redis", "--seconds", "--seconds 0", "--seconds x", "--write"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
