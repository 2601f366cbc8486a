//! The `tojson` filter, as Hugging Face's tokenizers define it: Python's `json.dumps`, without escaping for HTML.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

struct PythonJson<'a> {
    indent: Option<usize>,
    item: &'a str,
    key: &'a str,
    ascii: bool,
    sorted: bool,
}

/// `value | tojson(indent=.., separators=.., ensure_ascii=.., sort_keys=..)`.
pub(super) fn filter(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators = separators(options.get("separators")?)?;
    let (item, key) = match &separators {
        // As Python's `json.dumps`: with an indent a line ends at the comma.
        None if indent.is_some() => (",", ": "),
        None => (", ", ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
    };
    let flag = |name| Ok::<_, Error>(options.get::<Option<bool>>(name)?.unwrap_or(false));
    let style = PythonJson {
        indent,
        item,
        key,
        ascii: flag("ensure_ascii")?,
        sorted: flag("sort_keys")?,
    };
    // An unknown option would otherwise change nothing, and the prompt would differ from what the model was trained on.
    options.assert_all_used()?;
    // Before writing, which recurses: bounds depth, number of elements and size.
    super::bounds::measure(value)?;
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(out)
}

/// The maximum of a separator, in bytes: each is written for each element.
const SEPARATOR_BYTES_MAX: usize = 16;

/// Two short texts. They are looked at where they are: a list of any length would be copied with all that is in it.
fn separators(given: Option<Value>) -> Result<Option<[String; 2]>, Error> {
    let Some(given) = given.filter(|given| !given.is_none()) else {
        return Ok(None);
    };
    let separator = |index: usize| {
        let separator = given.get_item(&Value::from(index)).ok()?;
        let text = separator.as_str()?;
        (text.len() <= SEPARATOR_BYTES_MAX).then(|| text.to_owned())
    };
    match (given.len(), separator(0), separator(1)) {
        (Some(2), Some(item), Some(key)) => Ok(Some([item, key])),
        _ => {
            let message = "separators must be two short strings";
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
    }
}

impl PythonJson<'_> {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        // At each value, so that the output stops growing at the limit; the finished text is charged by `@held`.
        super::bounds::check_text(out.len())?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&super::python::number(value)),
            ValueKind::String => self.text(value.as_str().unwrap_or_default(), out)?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', &items, depth, out, |style, item, out| {
                    style.write(item, depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.list('{', '}', &keys, depth, out, |style, key, out| {
                    match key.as_str() {
                        Some(text) => style.text(text, out)?,
                        None => style.text(&super::bounds::printed(key)?, out)?,
                    }
                    out.push_str(style.key);
                    style.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            kind => {
                let message = format!("a value of kind {kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    fn list(
        &self,
        open: char,
        close: char,
        items: &[Value],
        depth: usize,
        out: &mut String,
        each: impl Fn(&Self, &Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(self.item);
            }
            self.line(depth + 1, out);
            each(self, item, out)?;
        }
        if !items.is_empty() {
            self.line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = self.indent {
            out.push('\n');
            // A template may ask for any indent, and depth multiplies it.
            out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
        }
    }

    fn text(&self, text: &str, out: &mut String) -> Result<(), Error> {
        // A character takes six bytes at most, and is written twice.
        super::bounds::check_text(out.len().saturating_add(text.len().saturating_mul(6)))?;
        // Serialising a string cannot fail.
        let quoted = serde_json::to_string(text).unwrap_or_default();
        if !self.ascii {
            out.push_str(&quoted);
            return Ok(());
        }
        // UTF-16 units, because Python escapes characters beyond U+FFFF as two surrogates.
        for unit in quoted.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => out.push(char::from(byte)),
                // Escaped, a mark would no longer stand for a text.
                _ if super::shield::MARKS.contains(&unit) => {
                    out.extend(char::from_u32(u32::from(unit)));
                }
                _ => out.push_str(&format!("\\u{unit:04x}")),
            }
        }
        Ok(())
    }
}
