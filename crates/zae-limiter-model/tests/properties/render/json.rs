//! A strict reader of JSON (RFC 8259), to judge what the crate writes.

/// A JSON value. A number stays text: its digits are what is judged.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Flag(bool),
    Number(String),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub(crate) fn get(&self, name: &str) -> Option<&Self> {
        let Self::Object(members) = self else { return None };
        members.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }
}

/// Reads the whole text as one value.
pub(crate) fn parse(text: &str) -> Result<Json, String> {
    let mut reader = Reader { rest: text };
    let value = reader.value()?;
    if reader.rest.is_empty() { Ok(value) } else { Err(reader.fail("the end")) }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn fail(&self, expected: &str) -> String {
        format!("expected {expected} at {:?}", self.rest)
    }

    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self) -> Result<Json, String> {
        if self.eat("true") {
            Ok(Json::Flag(true))
        } else if self.eat("false") {
            Ok(Json::Flag(false))
        } else if self.rest.starts_with('"') {
            self.text().map(Json::Text)
        } else if self.eat("[") {
            self.items("]", Self::value).map(Json::List)
        } else if self.eat("{") {
            let members = self.items("}", Self::member)?;
            let repeats = |at: usize| members[..at].iter().any(|(key, _)| *key == members[at].0);
            if (0..members.len()).any(repeats) {
                return Err(format!("a member twice in {members:?}"));
            }
            Ok(Json::Object(members))
        } else {
            self.number().map(Json::Number)
        }
    }

    fn items<T>(
        &mut self,
        end: &str,
        item: impl Fn(&mut Self) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        let mut items = Vec::new();
        if self.eat(end) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.eat(end) {
                return Ok(items);
            }
            if !self.eat(",") {
                return Err(self.fail(end));
            }
        }
    }

    fn member(&mut self) -> Result<(String, Json), String> {
        let key = self.text()?;
        if !self.eat(":") {
            return Err(self.fail(":"));
        }
        Ok((key, self.value()?))
    }

    fn text(&mut self) -> Result<String, String> {
        if !self.eat("\"") {
            return Err(self.fail("a string"));
        }
        let mut text = String::new();
        loop {
            let Some(next) = self.rest.chars().next() else { return Err(self.fail("a quote")) };
            self.rest = &self.rest[next.len_utf8()..];
            match next {
                '"' => return Ok(text),
                '\\' => text.push(self.escaped()?),
                control if control < ' ' => return Err(self.fail("no bare control")),
                plain => text.push(plain),
            }
        }
    }

    fn escaped(&mut self) -> Result<char, String> {
        const SHORT: [(&str, char); 8] = [
            ("\"", '"'),
            ("\\", '\\'),
            ("/", '/'),
            ("b", '\u{8}'),
            ("f", '\u{c}'),
            ("n", '\n'),
            ("r", '\r'),
            ("t", '\t'),
        ];
        if let Some((_, meant)) = SHORT.into_iter().find(|(token, _)| self.eat(token)) {
            return Ok(meant);
        }
        let digits = self.rest.get(1..5).filter(|_| self.rest.starts_with('u'));
        let digits = digits.filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let meant = code.and_then(char::from_u32).ok_or_else(|| self.fail("an escape"))?;
        self.rest = &self.rest[5..];
        Ok(meant)
    }

    /// An optional minus, digits without a leading zero, an optional fraction.
    fn number(&mut self) -> Result<String, String> {
        let end = |c: char| !(c.is_ascii_digit() || c == '-' || c == '.');
        let (number, rest) = self.rest.split_at(self.rest.find(end).unwrap_or(self.rest.len()));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let whole = whole.strip_prefix('-').unwrap_or(whole);
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(fraction) || (whole.len() > 1 && whole.starts_with('0')) {
            return Err(self.fail("a number"));
        }
        self.rest = rest;
        Ok(number.to_owned())
    }
}
