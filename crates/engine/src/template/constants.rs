//! What minijinja computes when it compiles a template, before there is a budget: `'a' * 1000 * 1000` becomes the text.
//!
//! Of all operators on constants only `*` makes more than it is given, so what each of them would make is added up.

use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, Macro, Stmt};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::bounds;

/// The maximum of bytes of all constants of a template that are multiplied.
const CONSTANT_BYTES_MAX: usize = 1 << 20;

/// Checks a template before it is compiled.
///
/// # Errors
/// It has constants that would be huge.
pub(super) fn check(template: &Stmt<'_>) -> Result<(), Error> {
    Constants::default().statement(template)
}

#[derive(Default)]
struct Constants {
    bytes: usize,
}

impl Constants {
    fn statement(&mut self, statement: &Stmt<'_>) -> Result<(), Error> {
        match statement {
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Ok(()),
            Stmt::Template(it) => self.statements(&it.children),
            Stmt::EmitExpr(it) => self.expression(&it.expr),
            Stmt::ForLoop(it) => {
                self.expressions([&it.target, &it.iter].into_iter().chain(&it.filter_expr))?;
                self.statements(&it.body)?;
                self.statements(&it.else_body)
            }
            Stmt::IfCond(it) => {
                self.expression(&it.expr)?;
                self.statements(&it.true_body)?;
                self.statements(&it.false_body)
            }
            Stmt::WithBlock(it) => {
                for (target, value) in &it.assignments {
                    self.expressions([target, value])?;
                }
                self.statements(&it.body)
            }
            Stmt::Set(it) => self.expressions([&it.target, &it.expr]),
            Stmt::SetBlock(it) => {
                self.expressions([&it.target].into_iter().chain(&it.filter))?;
                self.statements(&it.body)
            }
            Stmt::AutoEscape(it) => {
                self.expression(&it.enabled)?;
                self.statements(&it.body)
            }
            Stmt::FilterBlock(it) => {
                self.expression(&it.filter)?;
                self.statements(&it.body)
            }
            Stmt::Block(it) => self.statements(&it.body),
            Stmt::Import(it) => self.expressions([&it.expr, &it.name]),
            Stmt::FromImport(it) => self.expression(&it.expr),
            Stmt::Extends(it) => self.expression(&it.name),
            Stmt::Include(it) => self.expression(&it.name),
            Stmt::Macro(it) => self.definition(it),
            Stmt::CallBlock(it) => {
                self.call(&it.call)?;
                self.definition(&it.macro_decl)
            }
            Stmt::Do(it) => self.call(&it.call),
        }
    }

    fn statements(&mut self, statements: &[Stmt<'_>]) -> Result<(), Error> {
        statements.iter().try_for_each(|it| self.statement(it))
    }

    fn definition(&mut self, definition: &Macro<'_>) -> Result<(), Error> {
        self.expressions(definition.args.iter().chain(&definition.defaults))?;
        self.statements(&definition.body)
    }

    fn expressions<'a, 's: 'a>(
        &mut self,
        expressions: impl IntoIterator<Item = &'a Expr<'s>>,
    ) -> Result<(), Error> {
        expressions
            .into_iter()
            .try_for_each(|it| self.expression(it))
    }

    fn expression(&mut self, expression: &Expr<'_>) -> Result<(), Error> {
        match expression {
            Expr::Var(_) | Expr::Const(_) => Ok(()),
            Expr::Slice(it) => {
                let bounds = [&it.start, &it.stop, &it.step].into_iter().flatten();
                self.expressions([&it.expr].into_iter().chain(bounds))
            }
            Expr::UnaryOp(it) => self.expression(&it.expr),
            Expr::BinOp(it) => {
                // From the inside, so that the constants that are computed here have been checked.
                self.expressions([&it.left, &it.right])?;
                match it.op {
                    BinOpKind::Mul => self.product(&it.left, &it.right),
                    _ => Ok(()),
                }
            }
            Expr::Compare(it) => {
                self.expression(&it.expr)?;
                self.expressions(it.ops.iter().map(|op| &op.expr))
            }
            Expr::IfExpr(it) => {
                self.expressions([&it.test_expr, &it.true_expr])?;
                self.expressions(&it.false_expr)
            }
            Expr::Filter(it) => {
                self.expressions(&it.expr)?;
                self.arguments(&it.args)
            }
            Expr::Test(it) => {
                self.expression(&it.expr)?;
                self.arguments(&it.args)
            }
            Expr::GetAttr(it) => self.expression(&it.expr),
            Expr::GetItem(it) => self.expressions([&it.expr, &it.subscript_expr]),
            Expr::Call(it) => self.call(it),
            Expr::List(it) => self.expressions(&it.items),
            Expr::Tuple(it) => self.expressions(&it.items),
            Expr::Map(it) => self.expressions(it.keys.iter().chain(&it.values)),
        }
    }

    fn call(&mut self, call: &Call<'_>) -> Result<(), Error> {
        self.expression(&call.expr)?;
        self.arguments(&call.args)
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) -> Result<(), Error> {
        arguments.iter().try_for_each(|argument| match argument {
            CallArg::Pos(it)
            | CallArg::Kwarg(_, it)
            | CallArg::PosSplat(it)
            | CallArg::KwargSplat(it) => self.expression(it),
        })
    }

    fn product(&mut self, left: &Expr<'_>, right: &Expr<'_>) -> Result<(), Error> {
        let (Some(left), Some(right)) = (left.as_const(), right.as_const()) else {
            return Ok(());
        };
        let is_number = |value: &Value| {
            matches!(
                value.kind(),
                ValueKind::Number | ValueKind::Bool | ValueKind::None
            )
        };
        let (repeated, times) = match (is_number(&left), is_number(&right)) {
            // A number, or nothing at all.
            (true, true) | (false, false) => return Ok(()),
            (false, true) => (left, right),
            (true, false) => (right, left),
        };
        let bytes = bounds::size(&repeated, CONSTANT_BYTES_MAX)
            .map_err(|_| too_large())?
            .saturating_mul(times.as_usize().unwrap_or(0));
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > CONSTANT_BYTES_MAX {
            return Err(too_large());
        }
        Ok(())
    }
}

fn too_large() -> Error {
    let message = "it multiplies by constants that are too large";
    Error::new(ErrorKind::SyntaxError, message)
}
