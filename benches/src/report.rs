//! The text of a section: printed at once, and kept for the page.

use zae_limiter_core::{Clock, SystemClock, format_time};

/// The text of a section.
pub struct Report {
    conditions: String,
    text: String,
}

impl Report {
    /// A report of the run with these arguments, on this machine, from now on.
    pub fn new(words: &[String]) -> Self {
        let machine = Machine::read();
        let date = format_time(SystemClock.now());
        let arguments = words.iter().fold(String::new(), |all, word| all + " " + word);
        let separator = if arguments.is_empty() { "" } else { " --" };
        let conditions = format!(
            "Measured on {} on {} with {} and {}, load average {} at the start:\n\
             `cargo run --release --manifest-path benches/Cargo.toml{separator}{arguments}`",
            &date[..10],
            machine.cpu,
            machine.cores,
            env!("BENCH_RUSTC"),
            machine.load,
        );
        Self { conditions, text: String::new() }
    }

    /// Prints a heading. The page has its own.
    pub fn title(&self, title: &str) {
        println!("\n## {title}\n");
    }

    pub fn line(&mut self, line: impl AsRef<str>) {
        println!("{}", line.as_ref());
        self.text.push_str(line.as_ref());
        self.text.push('\n');
    }

    /// The content of the section's block in the page.
    pub fn block(&self) -> String {
        format!("{}\n\n{}", self.conditions, self.text)
    }
}

/// A number with commas, rounded to the next integer: `1,234,567`.
pub fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

struct Machine {
    cpu: String,
    cores: String,
    load: String,
}

impl Machine {
    fn read() -> Self {
        let file = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = model_name(&file("/proc/cpuinfo"));
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        Self {
            cpu: cpu.unwrap_or_else(|| format!("an unknown {} CPU", std::env::consts::ARCH)),
            cores: if cores == 1 { "1 core".to_owned() } else { format!("{cores} cores") },
            load: file("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned(),
        }
    }
}

fn model_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    let (_, name) = line.split_once(':')?;
    Some(name.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_names_date_machine_and_command() {
        let mut report =
            Report::new(&["memory".to_owned(), "--write".to_owned(), "x.md".to_owned()]);
        report.line("| a |");
        let block = report.block();
        assert!(block.starts_with("Measured on 20"), "{block}");
        assert!(block.contains("rustc 1."), "{block}");
        assert!(block.contains("benches/Cargo.toml -- memory --write x.md`\n\n| a |\n"), "{block}");
        assert_eq!(model_name("a: b\nmodel name\t: AMD  EPYC\n").as_deref(), Some("AMD EPYC"));
        assert_eq!(model_name(""), None);
    }

    #[test]
    fn numbers_have_commas() {
        for (number, text) in [(0.4, "0"), (999.0, "999"), (1_000.0, "1,000"), (1e6, "1,000,000")] {
            assert_eq!(grouped(number), text);
        }
    }
}
